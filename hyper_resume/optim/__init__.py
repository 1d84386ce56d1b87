"""Builds optimizers and schedulers from a configuration, chains several, and makes their state before the first step."""

from hyper_resume.optim.build import build_lr_schedulers, build_optimizer
from hyper_resume.optim.chained import ChainedOptimizer
from hyper_resume.optim.initial_state import initialize_optimizer_state

__all__ = ["ChainedOptimizer", "build_lr_schedulers", "build_optimizer", "initialize_optimizer_state"]
