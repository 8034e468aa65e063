"""Load an advantage estimator or a policy loss that was written for verl or SkyRL, as a function of our inputs.

Their estimators see padded token rewards and return advantages and returns; their losses return one number of a micro-batch. Ours
get the valid rows alone, and the loss of every token, which our objective aggregates over the whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from omegaconf import OmegaConf
from torch import Tensor

from posttrain.algos.own_functions import described, notice_not_finite
from posttrain.algos.verl.core_algos import TOKEN_MEAN, agg_loss, aggregated_by
from posttrain.algos.verl.skyrl_functions import NAMES
from posttrain.algos.verl.trainer_estimator import EstimatorInTrainer
from posttrain.errors import ConfigError, Problem, RequestError
from posttrain.libraries.skyrl_modules import standing_in
from posttrain.libraries.verl.modules import provide
from posttrain.user_files import defined_at, failed_at, import_path, last_line, parse_file, source_file
from posttrain.verl_functions import COLUMN, WEIGHTS, VerlFunction, find, of_trainer, with_columns

REPORTED = ("clip_fraction", "kl_old", "dual_clip_fraction")  # what verl up to 0.6 returns behind a loss


def load(path: str, name: str) -> Callable[..., Any]:
    """The function that ``find`` sees under ``name`` in a file or module, in our calling convention; its file is run now.

    Raises: ConfigError when importing it fails.
    """
    file = source_file(path)
    described = find(parse_file(path, file), name) or of_trainer(file, name)
    assert described is not None, f"{path} has no function {name} for verl"
    if described.in_trainer is not None:
        return EstimatorInTrainer(file, name, described)
    described = with_columns(described, file)
    provide(_checkout_of(file))
    with standing_in(NAMES):
        module = import_path(path)
    theirs = getattr(module, described.definition.name, None)
    if not callable(theirs):
        raise ConfigError(Problem(f"{described.definition.name!r} in {path} is not a function", field="name"))
    if not described.is_loss:
        return _Estimator(theirs, described)
    if "agg_loss" in vars(module):  # a fork's own: it would add up what our objective adds up
        module.__dict__["agg_loss"] = agg_loss
    return _Loss(theirs, described)


def _checkout_of(file: Path) -> Path | None:
    """The package verl that a file of a fork belongs to."""
    return next(
        (folder for folder in file.parents if folder.name == "verl" and (folder / "__init__.py").is_file()), None
    )


class _Estimator:
    """An estimator of theirs, called with our inputs in the order of its description."""

    def __init__(self, theirs: Callable[..., Any], described: VerlFunction):
        self._theirs, self._described = theirs, described

    def __call__(self, *inputs: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        """Advantages and returns [B, T], 0 on rows without a valid reward and behind the mask; such rows are not shown to it.

        Args: tensors; of a column of the data, B values.

        Raises: RequestError when it fails or returns something else.
        """
        ours = dict(zip(self._described.our_inputs, inputs, strict=True))
        valid, mask = ours["valid"], ours["response_mask"]
        empty = torch.zeros(mask.shape, dtype=torch.float32)
        if not valid.any():
            return empty, empty.clone()
        given: dict[str, Any] = {}
        for name, source in self._described.inputs.items():
            if source.startswith(COLUMN):
                given[name] = _array([value for value, kept in zip(ours[source], valid, strict=True) if kept])
                continue
            if ours[source] is None:  # values, without a critic
                given[name] = None
                continue
            rows = ours[source][valid]
            if source == "group_index":
                given[name] = rows.cpu().numpy()
            elif source == "response_mask":
                given[name] = rows.float()
            elif rows.is_floating_point() and rows.ndim == 2:
                given[name] = torch.where(mask[valid], rows, 0.0)
            else:
                given[name] = rows
        result = _called(self._theirs, given | _with_config(settings), "advantage.name")
        found = list(result) if isinstance(result, tuple) else [result, result]
        placed = []
        for part in found[:2]:
            if not isinstance(part, Tensor) or part.shape != mask[valid].shape:
                shape = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
                what = f"{_returned(self._theirs)} {shape}, and advantages are a tensor {list(mask[valid].shape)}"
                raise RequestError(Problem(what, fix="return (advantages, returns)", field="advantage.name"))
            whole = empty.clone()
            whole[valid] = torch.where(mask[valid], part.float(), 0.0)
            placed.append(whole)
        notice_not_finite(_returned(self._theirs), placed[0], mask & valid[:, None], ours.values())
        return placed[0], placed[1]


def _array(values: Sequence[Any]) -> numpy.ndarray[Any, Any]:
    """[B] objects, as verl's batches hold a column."""
    found = numpy.empty(len(values), dtype=object)
    found[:] = values
    return found


class _Loss:
    """A loss of theirs, called with our inputs in the order of its description."""

    def __init__(self, theirs: Callable[..., Any], described: VerlFunction):
        self._theirs, self._described = theirs, described

    def __call__(self, *inputs: Tensor, **settings: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss per token [B, T] and its report.

        A function that aggregates with verl's ``agg_loss`` or SkyRL's ``reduce_loss`` is exact for every micro-batch and
        aggregation. One that returns a mean of its own gives that mean to each of its tokens: exact for a mean over tokens, with
        loss.aggregation=token_mean. So does a sum for SkyRL, which is divided by the tokens.
        Raises: RequestError when it fails, or aggregates otherwise than the run.
        """
        ours = dict(zip(self._described.our_inputs, inputs, strict=True))
        mask, policy = ours["mask"], ours["policy_logprobs"]
        if not mask.any():
            return torch.where(mask, policy, 0.0), {}
        given: dict[str, Any] = {}
        for name, source in self._described.inputs.items():
            given[name] = mask.float() if source == "mask" else torch.where(mask, ours[source], 0.0)
        skyrl = self._described.is_for_skyrl
        config = settings.get("config") or {}
        mode = str(config.get("loss_reduction", "token_mean") if skyrl else config.get("loss_agg_mode", TOKEN_MEAN))
        takes = {each.arg for each in self._described.definition.args.args}
        given |= {"loss_agg_mode": mode} if "loss_agg_mode" in takes else {}
        given |= {name: None for name in WEIGHTS if name in takes}  # ours: loss.rollout_correction
        given |= _with_config(settings) if skyrl else _with_config(settings, global_batch_info={})
        with aggregated_by(mode):
            result = _called(self._theirs, given, "loss.name")
            loss, *others = result if isinstance(result, tuple) else (result,)
            if not isinstance(loss, Tensor) or loss.shape not in (mask.shape, torch.Size([])):
                expected = f"a loss is one number, or one of every token {list(mask.shape)}"
                what = f"{_returned(self._theirs)} {described(loss)}, and {expected}"
                raise RequestError(Problem(what, fix="return (loss, metrics)", field="loss.name"))
            if skyrl and loss.ndim == 0 and self._is_sum(loss, given):
                loss = loss / mask.sum()
        notice_not_finite(_returned(self._theirs), loss.expand(mask.shape), mask, ours.values())
        return torch.where(mask, loss, 0.0), _report(others, mask)

    def _is_sum(self, loss: Tensor, given: Mapping[str, Any]) -> bool:
        """Return True where the function adds up tokens, as SkyRL's own do since April 2026, and does not average them: of the
        same rows twice a sum is twice as large."""
        twice = {
            name: torch.cat([value, value]) if isinstance(value, Tensor) else value for name, value in given.items()
        }
        with torch.no_grad():
            result = _called(self._theirs, twice, "loss.name")
        again = result[0] if isinstance(result, tuple) else result
        return bool((again - 2 * loss).abs() < (again - loss).abs())


def _report(others: Sequence[Any], mask: Tensor) -> dict[str, Tensor]:
    """verl's metrics of a micro-batch as tensors [B, T], whose means over tokens are logged."""
    values: Mapping[str, Any] = dict(zip(REPORTED, others, strict=False))
    if others and isinstance(others[0], Mapping):
        values = {str(name).rpartition("/")[2]: value for name, value in others[0].items()}
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        number = value.detach().float() if isinstance(value, Tensor) else value
        if isinstance(number, int | float):
            number = torch.tensor(float(number))
        if isinstance(number, Tensor) and number.shape in (mask.shape, torch.Size([])):
            found[name] = torch.where(mask, number.to(mask.device), 0.0)
    return found


def _with_config(settings: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The settings, with the mapping ``config`` as the DictConfig that verl hands over."""
    if "config" not in settings:
        return dict(settings)
    return {**settings, "config": OmegaConf.create({**(settings["config"] or {}), **more})}


def _called(theirs: Callable[..., Any], given: Mapping[str, Any], field: str) -> Any:
    try:
        return theirs(**given)
    except RequestError:
        raise
    except (Exception, SystemExit) as error:  # a user's function may fail in any way
        what = f"{failed_at(error, theirs)}: {_name_of(theirs)} failed: {last_line(error)}"
        fix = "it is called as its own trainer calls it; what it reads from its config is in the setting config"
        raise RequestError(Problem(what, fix=fix, field=field)) from error


def _returned(theirs: Callable[..., Any]) -> str:
    return f"{defined_at(theirs)}: {_name_of(theirs)} returned"


def _name_of(theirs: Callable[..., Any]) -> str:
    return str(getattr(theirs, "__name__", theirs))
