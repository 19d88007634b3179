#!/usr/bin/env python3
"""Checks the packages pinned in a lock file for known vulnerabilities: `audit.py requirements.lock [--result FILE]`.

pip-audit queries PyPI, or OSV. If a service does not answer, or a mirror has no vulnerability data, pip-audit may report that all is well.
So each service is first queried for a release that is known to be vulnerable: a service that does not report it has no data.

The last line printed is the result: how many packages were audited, or `NOT audited` and why. `--result` writes it to a file, too.

Exit code 0: none is known, or no service could be queried. 1: there is one, or something could not be looked up.
"""

import argparse
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


def audit(lock: Path, auditor: Sequence[str]) -> tuple[int, str]:
    """Audits a lock file with the first service that has data; returns the exit code and the result in a line."""
    with tempfile.TemporaryDirectory() as folder:
        known = Path(folder, "known.txt")
        known.write_text(KNOWN)
        service = next((one for one in SERVICES if any(found.get("vulns") for found in ask(one, known, auditor))), None)
    if service is None:
        return 0, "audit: NOT audited: no service with vulnerability data can be reached from here (PyPI, OSV)"
    found = ask(service, lock, auditor)
    if not found:
        return 1, f"audit: NOT audited: {service} has data, but returned none for {lock.name}. Run make audit again"
    skipped = [one for one in found if "vulns" not in one]
    vulnerable = [one for one in found if one.get("vulns")]
    for one in vulnerable:
        for vulnerability in one["vulns"]:
            fixed = ", ".join(vulnerability.get("fix_versions", ())) or "no release yet"
            print(f"VULNERABLE: {one['name']} {one['version']}: {vulnerability['id']}, fixed in {fixed}")
    for one in skipped:
        print(f"could not be looked up: {one['name']}: {one.get('skip_reason', '')}")
    counts = f"{len(vulnerable)} vulnerable" + (f", {len(skipped)} could not be looked up" if skipped else "")
    return int(bool(vulnerable or skipped)), f"audit: audited {len(found) - len(skipped)} packages at {service}, {counts}"


def main(arguments: Sequence[str] | None = None, auditor: Sequence[str] = AUDITOR) -> int:
    """Prints what an audit finds, and its result as the last line; returns the exit code."""
    options = argparse.ArgumentParser(description="check a lock file for known vulnerabilities")
    options.add_argument("lock", type=Path)
    options.add_argument("--result", type=Path, help="file to write the result to, in a line")
    given = options.parse_args(arguments)
    code, result = audit(given.lock, auditor)
    print(result)
    if given.result:
        given.result.write_text(f"{result}\n")
    return code


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    sys.exit(main())
