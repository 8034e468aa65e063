"""Problems of the data sources that the files of a run name: domains without rows, and sources without a scorer."""

from __future__ import annotations

from posttrain.config import RunConfig
from posttrain.config.roles import reads_references
from posttrain.errors import Problem, did_you_mean


def data_source_problems(config: RunConfig) -> list[Problem]:
    """Return the problems of data sources without a scorer. Raises: DataError when a file cannot be read."""
    from posttrain.data.readers import data_sources
    from posttrain.rewards.load import check_data_sources, needs_data_sources

    # The sources of generated episodes are names in environment.named
    generated = config.environment.train_episodes is not None
    domains = {} if generated else config.data.domains
    if not domains and not needs_data_sources(config.reward):
        return []
    references = reads_references(config)
    training, held_out = (
        {
            source: file
            for file in reversed(files)
            for source in sorted(data_sources(file, config.data, references=references))
        }
        for files in (config.data.train_files, config.data.validation_files)
    )
    drawn = [source for domain in domains.values() for source in domain.sources]
    problems = [
        Problem(
            f"the domain {name} has no row: no training file holds a data source {' or '.join(domain.sources)}",
            fix=did_you_mean(domain.sources[0], list(training)),
            field=f"data.domains.{name}.sources",
        )
        for name, domain in domains.items()
        if not set(domain.sources) & set(training)
    ]
    if config.distillation.alone:  # rewards are measured only
        return problems
    scored = {source: file for source, file in training.items() if not domains or source in drawn}
    return problems + check_data_sources(config.reward, held_out | scored)
