"""Write the model of a checkpoint as a Hugging Face folder, with the recipe that the checkpoint itself keeps.

The trainer is opened on any layout that it can reshard the checkpoint to, without data; what is written does not depend
on the layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...api import load_plugins
from ...core.errors import EvenloadError, refuse_first, shorten
from ...core.input import reading
from ...core.recipe.recipe import Recipe, parse_with
from ...core.recipe.traits import trainer_called
from ...runtime.files import refuse_taken
from ..checkpoint import manifest
from ..hosts import require_for_folders, require_own_loop
from ..progress import Progress, silent

if TYPE_CHECKING:
    from ...runtime.watchdog.watchdog import Watchdog
    from ...runtime.world.world import World

_DO = "name a folder that checkpoint.dir has named, or a checkpoint in it"


def recipe_of(checkpoint: Path, overrides: Iterable[str], out: Path) -> tuple[Recipe, Path]:
    """The recipe of a checkpoint, or of the last good one in a folder of some, and the checkpoint itself.

    Raises EvenloadError: there is none, it does not say its recipe, the recipe cannot run here, or ``out`` is taken.
    """
    require_for_folders("a model's folder")
    refuse_taken(out)
    folder = checkpoint_in(checkpoint)
    kept = manifest.read(folder).state.get("recipe")
    load_plugins()
    what = f"the recipe in {manifest.NAME} of {shorten(str(checkpoint))}"
    recipe = parse_with(reading.mapping(kept, what, _DO), overrides)
    require_own_loop(recipe.trainer)
    refuse_first(*trainer_called(recipe.trainer).run_rules(recipe))
    return recipe, folder


def checkpoint_in(path: Path) -> Path:
    """A checkpoint, or the last good one in a folder of some. Raises EvenloadError where there is none."""
    from ..checkpoint.checkpoints import last_good

    folder = path if reading.is_file(path / manifest.NAME) else last_good(path)
    if folder is None:
        raise EvenloadError(f"there is no checkpoint in {shorten(str(path))}", "no complete one", _DO)
    return folder


def export(recipe: Recipe, checkpoint: Path, out: Path, progress: Progress = silent) -> dict[str, Any] | None:
    """Write the model on this rank; the result is that of `write_folder` with the step."""
    # And torch and Transformers, which the launcher needs not.
    from ...runtime.world.folder_lock import file_lock
    from ..checkpoint.checkpoints import require_whole
    from ..checkpoint.exporting import write_folder
    from ..job import host_until_end, in_world

    def work(world: World, watchdog: Watchdog) -> dict[str, Any]:
        with watchdog.working("verifying the checkpoint"):
            step = require_whole(checkpoint).state["step"]
        with host_until_end(recipe, world, watchdog) as host:
            with watchdog.working("loading the checkpoint"):
                host.load(checkpoint / "trainer")
            with watchdog.working("exporting the model"), file_lock(out.expanduser()):
                written = write_folder(host, recipe, out, progress)
        return {"checkpoint": str(checkpoint), "step": step, **written}

    return in_world(recipe, work)
