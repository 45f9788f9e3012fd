"""All user settings: frozen dataclasses read from TOML, with defaults in one place.

May import errors, ids and methods only. `[model]` and `[strategy]` also take the options of the
named component, which declares them as a frozen dataclass and reads them with `read_table`.
Start in `tables.py` (every table and key), then `reading.py`; `environment.py` reads variables.
"""

from __future__ import annotations

from atoll.config.constraints import agreed_device as agreed_device
from atoll.config.dipaco_tables import DiPaCoTable as DiPaCoTable
from atoll.config.environment import LEAST_STEP_VARIABLE as LEAST_STEP_VARIABLE
from atoll.config.environment import NO_DISPLAY as NO_DISPLAY
from atoll.config.environment import TICKET_VARIABLE as TICKET_VARIABLE
from atoll.config.environment import WorkerEnvironment as WorkerEnvironment
from atoll.config.environment import cache as cache
from atoll.config.environment import child_environment as child_environment
from atoll.config.environment import container_hosts as container_hosts
from atoll.config.environment import extended_environment as extended_environment
from atoll.config.environment import has_display as has_display
from atoll.config.environment import home as home
from atoll.config.environment import least_step_s as least_step_s
from atoll.config.environment import proxy_for as proxy_for
from atoll.config.environment import read_worker_environment as read_worker_environment
from atoll.config.environment import set_home as set_home
from atoll.config.environment import take_code as take_code
from atoll.config.environment import take_ticket as take_ticket
from atoll.config.environment import worker_environment as worker_environment
from atoll.config.environment import worker_variables as worker_variables
from atoll.config.island_tables import IslandTable as IslandTable
from atoll.config.log_table import LogTable as LogTable
from atoll.config.mesh import AXES as AXES
from atoll.config.mesh import MeshShape as MeshShape
from atoll.config.mesh import shrunk as shrunk
from atoll.config.rank_environment import RankPlace as RankPlace
from atoll.config.rank_environment import rank_environment as rank_environment
from atoll.config.rank_environment import rank_place as rank_place
from atoll.config.rank_environment import split_ranks as split_ranks
from atoll.config.rank_environment import supervised_place as supervised_place
from atoll.config.reading import OPTIMIZERS as OPTIMIZERS
from atoll.config.reading import TORCH_OPTIMIZER as TORCH_OPTIMIZER
from atoll.config.reading import load_spec as load_spec
from atoll.config.reading import parse_spec as parse_spec
from atoll.config.reading import read_spec as read_spec
from atoll.config.reading import read_table as read_table
from atoll.config.reading import worker_spec as worker_spec
from atoll.config.swarm_tables import SwarmTable as SwarmTable
from atoll.config.swarm_tables import largest_member as largest_member
from atoll.config.swarm_tables import member_spec as member_spec
from atoll.config.tables import CheckpointTable as CheckpointTable
from atoll.config.tables import DataTable as DataTable
from atoll.config.tables import JobSpec as JobSpec
from atoll.config.tables import JobTable as JobTable
from atoll.config.tables import LaunchTable as LaunchTable
from atoll.config.tables import ModelTable as ModelTable
from atoll.config.tables import NeedsTable as NeedsTable
from atoll.config.tables import StrategyTable as StrategyTable
from atoll.config.tables import TrainTable as TrainTable
from atoll.config.tune_tables import TuneTable as TuneTable
from atoll.config.tune_tables import sent_hashes as sent_hashes
from atoll.config.writing import dump_spec as dump_spec
from atoll.config.writing import dump_tables as dump_tables
