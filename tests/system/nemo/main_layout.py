"""Copies an installed nemo-gym 0.7.0 so that its capture package has the name that it has in Gym's main branch.

No release has that name yet. So this proves which names tokencache imports, with Gym's released code; what else main changes is not in it.
"""

import shutil
from pathlib import Path

RELEASED, MAIN = "nemo_gym.token_id_capture", "nemo_gym.models.token_capture"
_COPIED = ("nemo_gym", "responses_api_models/vllm_model")
"""The packages of Gym that import it in tests, below `site-packages`."""


def copy_with_main_names(site_packages: Path, folder: Path) -> Path:
    """Write the copy into a folder, which goes on `PYTHONPATH`. The old name does not exist in it."""
    for package in _COPIED:
        shutil.copytree(site_packages / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    place = folder / MAIN.replace(".", "/")
    place.parent.mkdir()
    for package in (place.parent, folder / "responses_api_models"):
        (package / "__init__.py").touch()
    (folder / RELEASED.replace(".", "/")).rename(place)
    for module in folder.rglob("*.py"):
        module.write_text(module.read_text().replace(RELEASED, MAIN))
    return folder
