"""The adapters travel with the package: in the wheel, and found there."""

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.adapters.kit import SHIPPED
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parents[2]


def test_an_installed_package_has_them(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=PATIENCE)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "from tokencache.adapters.load import load_all, shipped; print(shipped()); print(*load_all())"
    shown = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path / "site")}, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    where, names = shown.stdout.splitlines()
    assert Path(where) == tmp_path / "site/tokencache/harness_adapters"
    assert names.split() == list(SHIPPED)
