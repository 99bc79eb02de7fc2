"""All families of causal language models of the installed Transformers: planned exactly, or as they are with a word."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import hypothesis
import pytest
from evenload.integrations.host.versions import listed_version

pytestmark = pytest.mark.slow  # builds and trains a model of each

DOUBLE = 1e-9
LIST = Path(__file__).with_name("families.txt")
PARTS = 5
LISTED = "5.23.0"
"""The version of Transformers whose families the list and the page are of; `families_new.txt` has what came later."""
ON_LISTED = listed_version("transformers") == LISTED
NEW = LIST.with_name("families_new.txt")
LINES = LIST.read_text().splitlines() + ([] if ON_LISTED else NEW.read_text().splitlines())
LINES.sort(key=lambda line: line.split(": ")[0])


def test_the_list_has_every_family(families):
    assert [line.split(": ")[0] for line in LINES] == list(families.FAMILIES)


@pytest.mark.skipif(not ON_LISTED, reason="the page is of the pinned version")
def test_the_page_of_models_says_what_the_list_and_default_configs_say(families):
    assert families.section(LINES) in families.PAGE.read_text()


def test_a_config_that_raises_is_refused_with_a_word(families):
    assert "its config raises AmbiguousGlobalPerLayerAttributeError" in families.by_config("dots3_note")


def test_bad_input_a_family_without_a_config_is_a_row_and_no_traceback(families):
    line = next(line for line in LINES if line.startswith("gemma4_assistant: "))
    why = "there is no default config (StrictDataclassClassValidationError)"
    row = f"- **not run at this size; by default no packs: {why}**: `gemma4_assistant`"
    assert row in families.section([line]).replace("\n  ", " ")


@pytest.mark.drawn
@pytest.mark.parametrize("part", range(PARTS))
def test_a_family_is_planned_exactly_or_stays_as_it_is(part, families, caplog, request):
    """As many of them as a profile of hypothesis has examples, other ones at each seed, in turn; that is all of them in
    the full run. A family that packs, or no longer does, changes its line in the list: `python families.py --list`."""
    caplog.set_level(logging.CRITICAL)
    in_turn = random.Random(0).sample(LINES, len(LINES))[part::PARTS]
    count = min(hypothesis.settings().max_examples // PARTS, len(in_turn))
    first = int(request.config.getoption("--hypothesis-seed") or random.randrange(len(LINES))) * count
    for place in range(first, first + count):
        family, _, known = in_turn[place % len(in_turn)].partition(": ")
        said, error = families.outcome(family)
        # A stock step of some families runs on one machine and not on another: their lines have both ends. In a later
        # version more of them leave their attention to Transformers' interface, and pack.
        ends = known.split(" | ")
        packs_now = said == "planned" and "padded groups" in ends and not ON_LISTED
        assert packs_now or said in ends, (family, said)
        is_planned = said in ("planned", "padded groups")
        assert error < DOUBLE if is_planned else error == 0.0, (family, error)
