"""A recipe in one variable of the environment, for processes on other machines, whoever starts them.

Launchers carry some variables to other machines and drop the rest: one by pdsh passes those on whose names begin with
PYTHON, mpirun those that it is told. So there is one name, which begins so, and in it the whole recipe and not the path
of a file that the other machine may lack; in letters, digits, ``-``, ``_`` and ``=``, which no shell takes for its own.
"""

from __future__ import annotations

import base64
import json
import os
import zlib

from .recipe import Recipe, parse
from .traits import trainer_called

VARIABLE = "PYTHON_EVENLOAD"
CHECK = "PYTHON_EVENLOAD_CHECK"
"""Set where one step is checked and nothing updated (`integrations.unmodified.planned_runs`)."""
REQUIRE = "PYTHON_EVENLOAD_REQUIRE"
"""Set where a loop that cannot be planned is to end, and not to run as it is."""
ROWS = "PYTHON_EVENLOAD_ROWS"
"""Set where nothing is planned: the module whose rows go on in place of the trainer's (`core.verbs.Verb.rows`)."""


def carried(recipe: Recipe) -> str:
    """The recipe and the packages before which it is switched on; `commands/startup/sitecustomize.py` reads these."""
    content = {
        "before": trainer_called(recipe.trainer).first_imports,
        "recipe": recipe.model_dump(mode="json", exclude_unset=True),
    }
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(content).encode(), 9)).decode()


def carried_here() -> Recipe | None:
    """The recipe that this process was started with; None outside ``evenload run`` and its kin."""
    text = os.environ.get(VARIABLE)
    return recipe_in(json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))) if text else None


def recipe_in(content: dict[str, object]) -> Recipe:
    """The recipe of what `carried` was given. Raises EvenloadError."""
    recipe = content["recipe"]
    assert isinstance(recipe, dict)
    return parse(recipe)
