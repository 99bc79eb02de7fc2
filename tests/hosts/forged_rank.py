"""Runs a script as one rank that a forge has started: python forged_rank.py RECIPE-OR-NOTHING SCRIPT ARGUMENT...

As ``evenload run RECIPE -- torchrun SCRIPT`` does in the folder of HOSTS_OUT, but for the launcher and the imports.
"""

import os
import runpy
import sys
from pathlib import Path

import datasets
import evenload
import torch
from evenload.integrations.unmodified import roll_call

torch.set_num_threads(1)
# What is read from the environment at the import, which was the forge's.
datasets.config.HF_DATASETS_CACHE = Path(os.environ["HF_HOME"]) / "datasets"
startup = Path(__file__).parent / "startup"
sys.path.insert(0, str(startup))
runpy.run_path(str(startup / "sitecustomize.py"))
os.chdir(Path(os.environ["HOSTS_OUT"]).parent)
recipe, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
if recipe:
    roll_call._WAIT_S = float(os.environ.get("HOSTS_WAIT_S", roll_call._WAIT_S))
    evenload.enable(recipe)
runpy.run_path(script, run_name="__main__")
if measured := sys.modules.get("measured"):
    measured.leave()  # a fork ends without what it registered for its end
