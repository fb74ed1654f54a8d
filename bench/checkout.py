"""Which commit a benchmark's lines are of."""
import pathlib
import subprocess


def git_commit() -> str:
    """Of the checkout that these files lie in, in short; nothing where it is none, or git is not there."""
    root = pathlib.Path(__file__).resolve().parent.parent
    try:
        return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
