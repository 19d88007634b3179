#!/usr/bin/env python3
"""Checks the packages pinned in a lock file for known vulnerabilities: `audit.py requirements.lock`.

pip-audit queries PyPI, or OSV. If a service does not answer, or a mirror has no vulnerability data, pip-audit may report that all is well.
So each service is first queried for a release that is known to be vulnerable: a service that does not report it has no data.

Exit code 0: none is known, or no service could be queried, which is printed. 1: there is one, or something could not be looked up.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SERVICES = ("pypi", "osv")
KNOWN = "jinja2==2.4.1\n"
"""Affected by CVE-2014-0012, CVE-2016-10745, CVE-2019-10906 and more."""
SECONDS = 600
AUDITOR = (sys.executable, "-m", "pip_audit")


def ask(service: str, requirements: Path, auditor: Sequence[str]) -> list[dict]:
    """A service's data for pinned requirements: for each its name, version and `vulns`; empty if it cannot be queried."""
    command = [*auditor, "--vulnerability-service", service, "--requirement", str(requirements), "--no-deps", "--disable-pip"]
    try:
        done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, timeout=SECONDS, check=False)
        return json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, KeyError):
        return []


def main(lock: Path, auditor: Sequence[str] = AUDITOR) -> int:
    """Audits a lock file with the first service that has data; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        known = Path(folder, "known.txt")
        known.write_text(KNOWN)
        service = next((one for one in SERVICES if any(found.get("vulns") for found in ask(one, known, auditor))), None)
    if service is None:
        print("NOT AUDITED: no service with vulnerability data can be reached from here (PyPI, OSV)")
        return 0
    found = ask(service, lock, auditor)
    skipped = [one for one in found if "vulns" not in one]
    vulnerable = [one for one in found if one.get("vulns")]
    for one in vulnerable:
        for vulnerability in one["vulns"]:
            fixed = ", ".join(vulnerability.get("fix_versions", ())) or "no release yet"
            print(f"VULNERABLE: {one['name']} {one['version']}: {vulnerability['id']}, fixed in {fixed}")
    for one in skipped:
        print(f"could not be looked up: {one['name']}: {one.get('skip_reason', '')}")
    print(f"{len(found)} packages looked up at {service}: {len(vulnerable)} vulnerable, {len(skipped)} unknown")
    return 0 if found and not vulnerable and not skipped else 1


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    sys.exit(main(Path(sys.argv[1])))
