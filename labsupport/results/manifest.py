"""Which data, settings and code did this run have? Enough to run it again, or to see what changed.

config_sha256 = SHA-256 of the settings as JSON, keys sorted: one hash for one configuration

run = RunManifest.collect(dataset_sha256=data.sha256, …, config={"model": model_config}, …)
run.write("runs/7/manifest.json")
differences(run, other)                 # {'config.model.num_layers': (4, 6), 'seed': (0, 1)}
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

DISTRIBUTIONS = (
    *("labsupport", "torch", "transformers", "accelerate", "tokenizers", "safetensors"),
    *("numpy", "deepspeed", "vllm"),
)
GIT_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class RunManifest:
    """What has to be the same for a run to be the same.

    Raises ValueError for a setting that JSON cannot hold, and for an empty name or hash.
    """

    dataset_sha256: str
    tokenizer_sha256: str
    config: Mapping[str, Any] = field(hash=False)
    """Every setting: mappings, lists, numbers, words; dataclasses become mappings."""
    strategy: str
    """How the ranks share the work, as in "fsdp" or "ddp × tp 2"."""
    world_size: int
    seed: int
    hardware: str
    """Device and count, as in "2 CPU cores" or "1 × H200"."""
    versions: Mapping[str, str] = field(hash=False)
    """Python, operating system, and each library that is installed."""
    git_revision: str | None
    """Commit of the code; None outside a repository."""
    git_dirty: bool | None
    """Whether a tracked file differed from that commit."""
    started_at: str
    """UTC, as in 2026-01-31T12:00:00+00:00."""

    def __post_init__(self) -> None:
        words = ("dataset_sha256", "tokenizer_sha256", "strategy", "hardware", "started_at")
        for name in words:
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name}={value!r} must be a word or hash, for example 'ddp'")
        for name, smallest in (("world_size", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < smallest:
                raise ValueError(f"{name}={value!r} must be at least {smallest}, for example 1")
        for name in ("config", "versions"):
            object.__setattr__(self, name, json.loads(canonical_json(getattr(self, name))))

    @classmethod
    def collect(
        cls,
        *,
        dataset_sha256: str,
        tokenizer_sha256: str,
        config: Mapping[str, Any],
        strategy: str,
        world_size: int,
        seed: int,
        hardware: str,
    ) -> Self:
        """Add to what only the run knows the versions, the git revision, and the time: now."""
        revision, dirty = git_state(Path(__file__).parents[1] / "__init__.py")
        return cls(
            dataset_sha256=dataset_sha256,
            tokenizer_sha256=tokenizer_sha256,
            config=config,
            strategy=strategy,
            world_size=world_size,
            seed=seed,
            hardware=hardware,
            versions=installed_versions(),
            git_revision=revision,
            git_dirty=dirty,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    @property
    def config_sha256(self) -> str:
        """Hash of `config`, the same for the same settings in any order."""
        return hashlib.sha256(canonical_json(self.config).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON, `config_sha256` included."""
        return {**asdict(self), "config_sha256": self.config_sha256}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Undo `to_dict`. ValueError where a field is missing or `config` was changed since."""
        names = cls.__dataclass_fields__
        missing = [name for name in (*names, "config_sha256") if name not in content]
        if missing:
            raise ValueError(f"manifest lacks {', '.join(missing)}; RunManifest.write gives them")
        made = cls(**{name: content[name] for name in names})
        if made.config_sha256 != content["config_sha256"]:
            raise ValueError(
                f"manifest says config_sha256={content['config_sha256']!r}, but its config hashes "
                f"to {made.config_sha256!r}: it was edited; take the original"
            )
        return made

    def write(self, path: str | Path) -> Path:
        """Write as JSON; under another name first, so that nobody reads half a file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, delete=False, encoding="utf-8"
        ) as draft:
            draft.write(text)
        os.replace(draft.name, path)
        return path

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read what `write` wrote; ValueError when there is no manifest at `path`."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(
                f"manifest {str(path)!r} cannot be read ({error.strerror}); "
                f"name a file that RunManifest.write wrote, for example runs/7/manifest.json"
            ) from None
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise ValueError(
                f"{str(path)!r} is no manifest; name a file that RunManifest.write wrote"
            )
        return cls.from_dict(content)


def differences(first: RunManifest, second: RunManifest) -> dict[str, tuple[Any, Any]]:
    """Fields in which two runs differ, `config` and `versions` told apart by key: (first, second).

    A key that only one of them has is None in the other; the times of start are left out.
    """
    ours, theirs = _flat(asdict(first)), _flat(asdict(second))
    names = [*ours, *(name for name in theirs if name not in ours)]
    pairs = {name: (ours.get(name), theirs.get(name)) for name in names if name != "started_at"}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def canonical_json(content: Mapping[str, Any]) -> str:
    """One text for one content: keys sorted, 1.0 written as 1, dataclasses as mappings."""
    try:
        return json.dumps(_plain(content), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"config holds what JSON cannot ({error}); give mappings with words as keys, lists, "
            f"numbers, words, True, False or None, for example {{'learning_rate': 0.003}}"
        ) from None


def installed_versions() -> dict[str, str]:
    """Python, system and the libraries of `DISTRIBUTIONS` that are installed; imports none."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "system": platform.platform(terse=True)}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_state(file: Path) -> tuple[str | None, bool | None]:
    """(commit, whether tracked files differ from it) of the repository that tracks `file`."""
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None, None  # no git, no repository, or one that merely surrounds an installed copy
    revision = _git(file.parent, "rev-parse", "HEAD")
    status = _git(file.parent, "status", "--porcelain", "--untracked-files=no")
    return revision, None if status is None else bool(status)


def _git(folder: Path, *args: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *args]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _flat(content: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(content, Mapping) or not content:
        return {prefix: content}
    dotted = {f"{prefix}.{key}" if prefix else str(key): item for key, item in content.items()}
    return {name: value for key, item in dotted.items() for name, value in _flat(item, key).items()}
