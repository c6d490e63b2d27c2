"""Train with TensorFlow's own loop: `strategy.run` under MultiWorkerMirroredStrategy on two processes, which the script
starts.

python bare_tensorflow.py WORKLOAD DIRECTORY WARM_UP STEPS
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any


def start_both(arguments: list[str]) -> int:
    """Start one process for each worker in TF_CONFIG, as a user's shell script would, and return the largest exit
    code."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        workers = [f"127.0.0.1:{server.getsockname()[1]}" for server in (one, other)]
    started = []
    for index in range(2):
        place = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
        env = {**os.environ, "TF_CONFIG": place, "KERAS_BACKEND": "tensorflow", "TF_NUM_INTEROP_THREADS": "1"}
        started.append(subprocess.Popen([sys.executable, __file__, *arguments], env=env))
    return max(abs(process.wait()) for process in started)


def main(name: str, directory: str, warm_up: str, steps: str) -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    from marks import Stopwatch
    from workloads_keras import KERAS_WORKLOADS, loss_fn

    workload = KERAS_WORKLOADS[name]
    rank, size = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
    watch = Stopwatch(directory, int(warm_up), int(steps), is_main=rank == 0)
    with strategy.scope():
        model, optimizer, loss = workload.initial_model(), workload.optimizer(), loss_fn()
        optimizer.build(model.trainable_variables)
    batch = workload.batch_size * size
    arrays = tf.data.Dataset.from_tensor_slices(workload.data(watch.updates * batch)).batch(batch)
    batches = iter(strategy.experimental_distribute_dataset(arrays))

    def update(inputs: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(targets, model(inputs, training=True)) / size
        gradients = tape.gradient(value, model.trainable_variables)
        gradients = tf.distribute.get_replica_context().all_reduce("sum", gradients)
        if workload.gradient_clipping is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, workload.gradient_clipping)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    @tf.function
    def step(inputs: Any, targets: Any) -> Any:
        return strategy.reduce("sum", strategy.run(update, args=(inputs, targets)), axis=None)

    for _ in range(watch.updates):
        step(*next(batches))
        watch.lap()


if __name__ == "__main__":
    if "TF_CONFIG" in os.environ:
        main(*sys.argv[1:])
    else:
        sys.exit(start_both(sys.argv[1:]))
