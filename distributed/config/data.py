"""Options of the data pipeline, the option group `data`."""

from __future__ import annotations

import dataclasses

from distributed.config.fields import setting


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Options of the data pipeline, the option group `data`."""

    presharded: bool = setting(False, "each rank's loader already yields only its own part of the data")
    shard_streams: bool = setting(True, "let each rank read only its part of a stream that has shard(index, count)")
    remove_unused_columns: bool = setting(True, "drop columns of a Hugging Face data set that the model does not take")
