"""Make room on the disks of NVMe offload when a stage starts, or refuse to start it, by the same count as its plan."""

import socket

from pipeline import dist
from pipeline.configuration.ds_config import is_on_nvme
from pipeline.engine.build import compute_dtype, engine_jsons
from pipeline.errors import EnvironmentFault, raise_lines
from pipeline.files import refused_by_disk
from pipeline.planning.disk import earlier_files, nvme_files, without_room
from pipeline.planning.measurement import model_size
from pipeline.rendezvous import local_size
from pipeline.run.run import Run


def make_room(run: Run) -> None:
    """Delete what earlier runs have left in the folders of NVMe that this run's engines write to. A collective.

    Raises:
        EnvironmentFault: on every rank, where a machine lacks room for the files of its own processes.
    """
    engines = engine_jsons(run)
    if not any(is_on_nvme(json, "offload_optimizer") or is_on_nvme(json, "offload_param") for json in engines.values()):
        return
    dtype, size, here = compute_dtype(run), run.world.size, local_size()
    sizes = {use.role: model_size(use, dtype) for use in run.stage.needs(run.resolved.config, {}, dtype, size).models}
    files = nvme_files(sizes, engines, ranks=size, per_host=here)

    def look() -> None:
        for folder in files:
            with refused_by_disk(folder):
                folder.mkdir(parents=True, exist_ok=True)
                for file in earlier_files(folder):
                    file.unlink(missing_ok=True)
        host = f"{socket.gethostname()}: " if here < size else ""
        raise_lines((f"{host}{fault}" for fault in without_room(files)), EnvironmentFault)

    dist.on_each_machine(look)
