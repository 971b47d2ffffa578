"""This library's version, as stored in manifests and data files, and the distribution that installs it."""

from pathlib import Path

VERSION = "0.1.0"

DISTRIBUTION = "bcp-checkpoint"
"""The name on the package index. There, ``bytecheckpoint`` is another project that installs a package of our name."""

# What safetensors files of checkpoints say of themselves; "pt" is what other tools look for.
HEADER_METADATA = {"format": "pt", "bytecheckpoint": VERSION}

_PARENT = Path(__file__).parents[1]


def install_command(extra: str) -> str:
    """Return the command that adds the packages of an extra to this installation, which may be a source tree."""
    if (_PARENT / "pyproject.toml").exists():
        return f"pip install -e '{_PARENT}[{extra}]'"
    return f"pip install '{DISTRIBUTION}[{extra}]'"


# This runs before any other module is imported: some of theirs would be found in place of ours.
if _theirs := next(_PARENT.glob("bytecheckpoint-*.dist-info"), None):
    raise ImportError(
        f"two distributions have installed their files into {_PARENT / 'bytecheckpoint'}: {DISTRIBUTION} and "
        f"{_theirs.name.removesuffix('.dist-info')}. Use them in separate environments. To repair this one: "
        f"pip uninstall bytecheckpoint {DISTRIBUTION} && pip install {DISTRIBUTION}"
    )
