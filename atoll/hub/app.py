"""The hub: opens the stores, connects sessions, rounds and scheduler, and serves ASGI."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.applications import Starlette

from atoll import __version__
from atoll.clock import Clock, RealClock
from atoll.errors import AtollError
from atoll.hub.alarms.collect import FactCollector
from atoll.hub.alarms.notify import Notifier
from atoll.hub.alarms.notify_config import load_targets
from atoll.hub.alarms.watch import AlarmWatch
from atoll.hub.discovery import MdnsAnnouncement, announcement_of
from atoll.hub.grouped import GroupedJobs
from atoll.hub.housekeeping import Housekeeping
from atoll.hub.http.live import HubFacade
from atoll.hub.jobs import deletion as deletion_rows_module
from atoll.hub.jobs.deletion import Deletions
from atoll.hub.jobs.retention import Retention
from atoll.hub.message_router import MessageRouter
from atoll.hub.nodes.access import Access
from atoll.hub.nodes.membership import Membership
from atoll.hub.nodes.meters import SessionMeters
from atoll.hub.nodes.sampler import HubSampler
from atoll.hub.nodes.services import JobServices
from atoll.hub.nodes.token_meters import TokenMeters
from atoll.hub.options import HubOptions as HubOptions
from atoll.hub.planning.planner import Planner
from atoll.hub.planning.replanning import Replanner
from atoll.hub.queues import json_socket
from atoll.hub.rounds import checkpoints as checkpoints_module
from atoll.hub.rounds import store as round_book_module
from atoll.hub.rounds.checkpoints import Checkpoints
from atoll.hub.rounds.recovery import RecoveryCoordinator
from atoll.hub.rounds.service import RoundService
from atoll.hub.rounds.store import RoundStore
from atoll.hub.scheduler.reducer_clients import ReducerProcesses, torch_is_here
from atoll.hub.scheduler.scheduler import Scheduler
from atoll.hub.security import audit as audit_module
from atoll.hub.security import node_certificates as node_certificates_module
from atoll.hub.security.audit import Audit
from atoll.hub.security.auth import PROGRAM
from atoll.hub.security.certificates import make_secret_folder
from atoll.hub.security.connection_limits import ConnectionLimiter, is_loopback
from atoll.hub.security.forwarded import TrustedProxies, forwarded_address, without_prefix
from atoll.hub.security.node_certificates import NodeCertificates
from atoll.hub.security.pairing import Pairing
from atoll.hub.security.tickets import host_of, ticket_text
from atoll.hub.security.tls import TlsFiles, choose
from atoll.hub.sessions.rejections import RejectionCounts, RejectionLog
from atoll.hub.sessions.send_queue import Send
from atoll.hub.sessions.session import Receive, Scope, Session, Sessions
from atoll.hub.storage.backup import save_last_folder
from atoll.hub.storage.copy_places import CopyPlaces
from atoll.hub.storage.restore import restore
from atoll.hub.stores import Stores, open_stores
from atoll.hub.tasks import Tasks
from atoll.hub.telemetry import Telemetry
from atoll.hub.urls import Context, add_authentication, routes
from atoll.hub.verification.service import VerificationService
from atoll.ids import REDUCER, is_reducer
from atoll.wire.messages import Envelope

Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Hub:
    """The components of a running hub; made by :func:`open_hub`."""

    def __init__(self, options: HubOptions, stores: Stores, *, url: str, clock: Clock) -> None:
        self.options = options
        self.stores = stores
        self.clock = clock
        self.url = url
        self.prefix = ""
        self.announcement: MdnsAnnouncement | None = None
        self.telemetry: Telemetry | None = None
        self.ticket = ""
        self.operator_token = ""
        self.tasks = Tasks()
        self.proxies = TrustedProxies(options.trust_proxy)
        self.limiter = ConnectionLimiter(
            options.limits, exempt=self.proxies.trusts, ledger=stores.ledger
        )
        self.audit = Audit(stores.database, clock=clock)
        self.tls: TlsFiles | None = None
        """Set by :meth:`start`; None without TLS."""
        self.sessions = Sessions(
            auth=stores.auth, clock=clock, tasks=self.tasks,
            hello_timeout_s=options.hello_timeout_s, dead_after_s=options.dead_after_s,
            reconnect_grace_s=options.reconnect_grace_s,
        )  # fmt: skip
        SessionMeters(stores.ledger, self.sessions, clock=clock)
        round_store = RoundStore(database=stores.database, jobs=stores.jobs, clock=clock)
        self.rounds = RoundService(
            store=round_store, events=stores.events, clock=clock, wire=self.sessions,
            relayed=self.sessions.relay.job_bytes, first_grace_s=options.first_grace_s,
        )  # fmt: skip
        self.checkpoints = Checkpoints(
            database=stores.database, jobs=stores.jobs, files=stores.files,
            events=stores.events, rounds=self.rounds, clock=clock,
        )  # fmt: skip
        self.membership = Membership(
            stores=stores, sessions=self.sessions, rounds=self.rounds,
            checkpoints=self.checkpoints, clock=clock,
        )  # fmt: skip
        self.grouped = GroupedJobs.of(
            stores, checkpoints=self.checkpoints, membership=self.membership, rounds=self.rounds,
            sessions=self.sessions, clock=clock, start_s=options.first_grace_s,
        )  # fmt: skip
        self.verification = self.rounds.runtimes.observer = VerificationService(
            stores, clock=clock, tasks=self.tasks, live=self.membership.live,
            fail=self.membership.fail,
        )  # fmt: skip
        self.planner = Planner(data=options.data, torch=torch_is_here())
        self.reducers: ReducerProcesses | None = None
        if options.reducers and torch_is_here():
            folder = options.data / "reducers"
            self.reducers = ReducerProcesses(
                stores=stores, tasks=self.tasks, url=lambda: self.url, ca=lambda: self.ca,
                folder=folder,
            )  # fmt: skip
        services = JobServices(
            stores=stores, sessions=self.sessions, membership=self.membership,
            rounds=self.rounds, checkpoints=self.checkpoints, swarm=self.grouped.swarm,
            paths=self.grouped.paths, verification=self.verification, clock=clock,
        )  # fmt: skip
        self.scheduler = Scheduler(
            services, reducers=self.reducers, kill_grace_s=options.kill_grace_s
        )
        self.membership.changed = self.scheduler.review
        self.rejections = RejectionLog(events=stores.events, jobs=stores.jobs, clock=clock)
        self.router = MessageRouter(
            services,
            scheduler=self.scheduler,
            recovery=RecoveryCoordinator(
                rounds=self.rounds, jobs=stores.jobs, events=stores.events,
                checkpoints=self.checkpoints, clock=clock,
            ),
            rejections=RejectionCounts(stores.events, clock=clock),
            tasks=self.tasks,
        )  # fmt: skip
        self.live = HubFacade(services, self.scheduler)
        self.replanner = Replanner(
            services, planner=self.planner, nodes=self.live.nodes, clock=clock, hub=url
        )
        self.sampler = HubSampler(stores, clock=clock)
        self.deletions = Deletions(
            stores=stores, stop_work=self.checkpoints.forget, settled=self.scheduler.schedule,
            tasks=self.tasks, clock=clock,
        )  # fmt: skip
        self.retention = Retention(
            keeping=options.keeping, jobs=stores.jobs, deletions=self.deletions, clock=clock
        )
        collector = FactCollector(services, version=__version__, data=options.data)
        self.watch = AlarmWatch(
            collector=collector, alarms=stores.alarms, events=stores.events, clock=clock,
            intervals=options.alarm_intervals,
        )  # fmt: skip
        self.sessions.listener = self
        self.meters = TokenMeters(stores.ledger, self.sessions, clock=clock)
        self._web: Application | None = None
        self._json_sockets = json_socket.JsonSockets(
            self.router.queues, auth=stores.auth, sessions=self.sessions
        )

    async def start(self) -> None:
        """Restore the state of the last run and start the background tasks."""
        await self.stores.queue.start()
        uses = self.options.ticket_uses
        secrets = await self.stores.auth.open_secrets(self.options.data, uses=uses)
        self.operator_token = secrets.operator_token
        access = await self._open_tls()
        self.sessions.admit = access.admit
        address_shown, self.prefix = forwarded_address(self.options.advertise, self.options.prefix)

        def make_ticket() -> None:
            mark = self.tls.mark if self.tls else ""
            self.ticket = ticket_text(self.url, secrets.ticket, advertise=address_shown, mark=mark)

        make_ticket()
        if self.tls is not None:
            self.tls.on_switch = make_ticket
        context = Context(
            stores=self.stores, live=self.live, clock=self.clock, version=__version__,
            started=self.clock.wall(), ticket_of=lambda: self.ticket, tell=self.sessions.notify,
            access=access, audit=self.audit, deletions=self.deletions, limits=self.options.limits,
            rendezvous=self.scheduler.followers.rendezvous, pairing=Pairing(self.clock),
            verification=self.verification, planner=self.planner, url=self.url,
        )  # fmt: skip
        await asyncio.to_thread(self._save_folder)
        await self._announce()
        if self.options.otlp:
            self.telemetry = Telemetry(context, url=self.options.otlp)
            self.tasks.start(self.telemetry.run(), name="telemetry")
        self._web = add_authentication(Starlette(routes=routes(context)), context)
        await self.checkpoints.restart()
        await self.deletions.restart()
        await self.scheduler.restart()
        self.tasks.start(Housekeeping(self).run(), name="housekeeping")
        await self._start_notifier()
        self.tasks.start(self.watch.run(), name="alarms")
        self.tasks.start(self.replanner.run(), name="planning again")

    async def _announce(self) -> None:
        """Announce the hub by mDNS, unless it listens on loopback only."""
        host, wanted = self.options.host, self.options.announce
        if wanted or (wanted is None and not is_loopback(host)):
            self.announcement = announcement_of(
                self.url, host=host, prefix=self.prefix, fingerprint=self.fingerprint
            )
            announcing = self.announcement.start(needed=bool(wanted))
            if wanted:
                await announcing
            else:
                self.tasks.start(announcing, name="announcement")

    async def _start_notifier(self) -> None:
        path = self.options.hooks or self.options.data / "hooks.toml"
        if self.options.hooks is None and not path.exists():
            return
        found = await asyncio.to_thread(load_targets, path)
        notifier = Notifier(found, events=self.stores.events, clock=self.clock, hub=self.url)
        self.watch.on_alarm = notifier.tell
        self.tasks.start(notifier.run(), name="hooks")

    async def _open_tls(self) -> Access:
        options, stores = self.options, self.stores
        choice = choose(options.tls, host=options.host)
        if choice.mode != "off":
            self.tls = await asyncio.to_thread(
                TlsFiles, choice, data=options.data, clock=self.clock,
                names=(options.host, host_of(options.advertise)),
            )  # fmt: skip
            self.tasks.start(self.tls.keep(), name="certificates")
        tls = self.tls
        certificates = NodeCertificates(
            (lambda: tls.authorities[-1]) if tls else None, database=stores.database,
            clock=self.clock,
        )  # fmt: skip
        return Access(
            stores=stores, sessions=self.sessions, certificates=certificates, limiter=self.limiter,
            tls=tls, meters=self.meters,
        )  # fmt: skip

    @property
    def ca(self) -> str:
        """PEM file with the authority that clients on this machine trust; empty without TLS."""
        return str(self.tls.ca) if self.tls else ""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the hub's authority; empty without one."""
        return self.tls.fingerprint if self.tls else ""

    def _save_folder(self) -> None:
        """Save the folder's path for `atoll hub backup`."""
        address = self.ticket.removeprefix("atoll://").rpartition("/")[0]
        with contextlib.suppress(OSError):
            save_last_folder(self.options.data, jobs=self.options.jobs, address=address)

    async def close(self) -> None:
        """Stop reducers and tasks, then close the stores; members stay and reconnect."""
        await self.tasks.close()
        if self.announcement is not None:
            await self.announcement.close()
        if self.telemetry is not None:
            await self.telemetry.close()
        await self.checkpoints.close()
        await self.sampler.close()
        await self.stores.close()

    async def asgi(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve WebSockets at `/ws` and those of JSON, everything else as the web application."""
        scope = without_prefix(scope, self.prefix)
        self.proxies.look_behind(scope)
        if scope["type"] == "websocket":
            if scope["path"] == "/ws":
                await self.sessions.serve(scope, receive, send)
            elif scope["path"] == json_socket.PATH:
                await self._json_sockets.serve(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})
        elif self._web is not None:
            await self._web(scope, receive, send)

    # ----------------------------------------------------------------- what sessions report

    def opened(self, session: Session, *, resumed: bool) -> None:
        """Register a connected process with membership or rounds."""
        self.watch.opened(session.address, session.incarnation)
        silent = not session.job and session.identity.role == "operator" and session.info is None
        if silent or session.identity.role == PROGRAM:
            return
        if not session.job:
            work = self.membership.node_opened(session)
        elif session.member == REDUCER:
            work = self.rounds.reducer_here(session.job)
        elif is_reducer(session.member):  # a parameter server does not take part in rounds
            return
        else:
            work = self.membership.member_opened(session)
        self.tasks.start(work, name=f"arrival of {session.address}")

    def lost(self, session: Session) -> None:
        """Handle the final end of a session."""
        if session.identity.role == PROGRAM:
            return
        if not session.job:
            work = self.membership.node_lost(session)
        elif is_reducer(session.member):
            work = self._reducer_lost(session.job, session.member)
        else:
            work = self.membership.member_lost(session)
        self.tasks.start(work, name=f"loss of {session.address}")

    def received(self, session: Session, envelope: Envelope) -> None:
        """Route a control message."""
        self.router.received(session, envelope)

    def rejected(self, peer: str, error: AtollError, *, job: str, source: str) -> None:
        """Record a rejected connection as an event and in the audit log."""
        work = self.rejections.note(peer, error, job=job, source=source)
        self.tasks.start(work, name=f"refusal of {peer or source}")
        noted = self.audit.note(
            None, address=source, action="session", target=peer, outcome=error.what,
            refused=True,
        )  # fmt: skip
        self.tasks.start(noted, name="audit of a refusal")

    async def _reducer_lost(self, job: str, reducer: str) -> None:
        if reducer == REDUCER:
            await self.rounds.reducer_lost(job)
        await self.scheduler.reducer_lost(job, reducer)


async def open_hub(options: HubOptions, *, url: str, clock: Clock | None = None) -> Hub:
    """Open the stores and return a hub that is not started yet.

    Raises:
        HubError: the data folder is damaged, or another hub uses it.
        StorageFull: its disk is full.
        CheckpointCorrupt: the backup to restore from is damaged.
    """
    clock = clock or RealClock()
    await asyncio.to_thread(make_secret_folder, options.data)
    if options.restore_from is not None:
        backup, data, jobs = options.restore_from, options.data, options.jobs
        await asyncio.to_thread(restore, backup, data=data, jobs=jobs, clock=clock)
    schemas = (round_book_module.SCHEMA, checkpoints_module.SCHEMA, audit_module.SCHEMA,
               node_certificates_module.SCHEMA, deletion_rows_module.SCHEMA)  # fmt: skip
    stores = await open_stores(
        options.data, jobs_dir=options.jobs, clock=clock, schemas=schemas, queue=options.queue,
        copies=CopyPlaces(options.copies), quotas=options.quotas,
    )  # fmt: skip
    try:
        return Hub(options, stores, url=url, clock=clock)
    except BaseException:
        await stores.close()
        raise
