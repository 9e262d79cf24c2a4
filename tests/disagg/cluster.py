"""Prefill and decode workers in one process, with connections and transfers that a test delays and breaks.

Each worker is a pure scheduler with a fake device that remembers, for each KV position, a hash of its whole
prefix (see `tests.scheduler.simulation`). Pushed pages are copied between the devices' memories one by one,
at any time until the push has ended. Each page that is written or read by a push must have the right owner
at that moment, and each request's output must be that of the fake model.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random

import numpy as np
from msgspec import structs

from segue.disagg.lease import LOST_S, LeaseState
from segue.disagg.offer import REMEMBERED_S, HeldPages
from segue.disagg.transports.choice import TRAITS
from segue.errors import RoleChangedError
from segue.messages.control import PauseMode, RoleSet, SchedulerOutput, SetRole
from segue.messages.fleet import Role
from segue.messages.guided import GrammarSpec
from segue.messages.kv import (
    BanWriters,
    ConnectPeer,
    DisconnectPeer,
    Gone,
    HeadSums,
    Hello,
    KVIdentity,
    KVMessage,
    PagesPrepared,
    Pong,
    PreparePages,
    PushEnded,
    PushPages,
    ReservePages,
    Sent,
    WritersGone,
)
from segue.messages.requests import Abort, AddRequest, Finished, Handoff, Rejected, SamplingParams, pack_ids
from segue.messages.steps import StepPlan, StepResult
from segue.scheduler.adoption import Adoption
from segue.scheduler.handover import Handover
from segue.scheduler.invariants import find_problems
from segue.scheduler.request import Request
from segue.scheduler.role import WORK, kind_of
from segue.scheduler.scheduler import Scheduler
from tests.scheduler.simulation import FakeDevice, Simulation

TIMES = (0.01, 0.5, 0.5, 3.0, 11.0)  # seconds by which the clock moves
VERSIONS_MAY_MIX = -1  # the epoch of a request that may read KV of the version before its own


def in_pieces(entry: tuple[int, str]) -> tuple[int, str]:
    """The KV of a position whose heads are out of order; of that, what it is in order."""
    return ~entry[0], entry[1]


class Device(FakeDevice):
    """A device whose memory other workers write, and that knows when each page was written last."""

    sim: Worker

    def launch(self, plan: StepPlan, version: str) -> StepResult:
        """Run a step, and note which pages it writes."""
        result = super().launch(plan, version)
        for index, slot in enumerate(plan.slots):
            size, table = self.limits.page_size, self.tables[slot]
            for position in range(plan.starts[index], plan.starts[index] + plan.lens[index]):
                self.sim.written[table[position // size]] = plan.step
        return result

    def check_version(self, slot: int, version: str) -> None:
        """Assert that a request reads KV of its weights, or of those that these have replaced in place."""
        (request,) = (r for r in self.sim.scheduler.running.values() if r.slot == slot)
        oldest, newest = int(self.born[slot]), self.sim.scheduler.kv_epoch
        if request.kv_epoch == self.sim.adopted_at.get(request.rid):
            oldest = request.kv_epoch  # weights may have been committed before a plan told the device of it
        if request.kv_epoch == VERSIONS_MAY_MIX:  # the two versions of one commit, here or at its source
            oldest = self.sim.adopted_at[request.rid] - 1
            newest = max(newest, self.sim.adopted_at[request.rid] + 1)
        assert int(version) >= oldest, "KV of old weights was shared"
        assert int(version) <= newest, "KV of weights that are not served is read"


class NotingHandover(Handover):
    """Notes which requests end because pages are lost."""

    def __init__(self, scheduler: Scheduler, device: Device) -> None:
        super().__init__(scheduler)
        self.adoption = self.noting = NotingAdoption(self, scheduler, device)
        self.without_pages: set[str] = set()  # rids

    def fail_without_pages(self, request: Request) -> None:
        """Assert that a last word is long overdue for all pages that are lent."""
        holds = list(self.machine.leases.holds())
        states = {lease.state for lease, _ in holds}
        assert holds and states <= {LeaseState.REVOKED, LeaseState.QUARANTINED}, f"{request.rid}: {states}"
        assert all(self._scheduler.now >= lease.left_at + LOST_S for lease, _ in holds), request.rid
        self.without_pages.add(request.rid)
        super().fail_without_pages(request)


class NotingAdoption(Adoption):
    """Notes when requests are adopted."""

    def __init__(self, handover: Handover, scheduler: Scheduler, device: Device) -> None:
        super().__init__(handover, scheduler)
        self._device = device
        self.adopted_at: dict[str, int] = {}  # rid -> the epoch of the weights

    def start_decode(self, request: Request, hold: HeldPages, *, kv_epoch: int) -> None:
        self.adopted_at[request.rid] = self._scheduler.kv_epoch
        size = self._scheduler.limits.page_size
        entries = (self._device.kv[hold.pages[p // size], p % size] for p in range(request.prompt_len))
        oldest = min(int(version) for _, version in entries)
        assert oldest <= self._scheduler.kv_epoch, "KV of weights that were never served here is adopted"
        super().start_decode(request, hold, kv_epoch=kv_epoch)


def salt_of(number: int) -> str:
    """Returns the salt of a request, by its number."""
    return ("", "", "one", "other")[number % 4]


@dataclass
class Push:
    """A push that runs in a prefill worker."""

    command: PushPages
    num_written: int = 0
    crcs: list[int] = field(default_factory=list)  # of the pages that are written


class Worker(Simulation):
    """One worker: its scheduler, its device, and the pushes that it runs."""

    def __init__(self, name: str, work: Role, incarnation: str, **limits: int) -> None:
        super().__init__(**({"role": work} | limits))  # type: ignore[arg-type]
        self.name, self.incarnation = name, incarnation
        self.device = Device(self.limits)
        self.device.sim = self
        self.scheduler.handover = handover = NotingHandover(self.scheduler, self.device)
        self.machine = handover.machine
        self.written: dict[int, int] = {}  # page -> the last step that wrote to it
        self.applied = 0  # the last step whose result was read
        self.pushes: list[Push] = []
        self.connected: set[str] = set()  # sessions whose memory is open
        self.unprepared: list[PreparePages] = []  # pages that have landed, and are to be made ready
        self.has_two_ranks = False  # while it prefills; each has one of the two heads
        self.banned: set[str] = set()  # sessions that nobody may write for any more
        self.unproven: set[str] = set()  # those of them for which somebody may still write
        self.wants_commit: str | None = None  # the version that is to be committed
        self.commit_mode: PauseMode | None = None  # how, unless the commit has begun
        self.errors: dict[str, str] = {}
        self.leaving_until = 0.0  # when its old role is back
        self.adopted_at = handover.noting.adopted_at
        self.without_pages = handover.without_pages

    @property
    def role(self) -> Role:
        """Which work it does now."""
        return self.scheduler.roles.role

    @property
    def is_leaving(self) -> bool:
        """Whether its role is about to change."""
        return self.scheduler.roles.next_role is not None

    def start(
        self,
        rid: str,
        prompt: list[int],
        params: SamplingParams,
        handoff: Handoff | None,
        salt: str = "",
    ) -> bool:
        """Send a request; returns whether it was accepted."""
        self.scheduler.now = self.now
        message = AddRequest(
            rid=rid, prompt=pack_ids(prompt), params=params, handoff=handoff, cache_salt=salt
        )
        answer = self.scheduler.add(message, self.now)
        if isinstance(answer, Rejected):
            return False
        self.prompts[rid], self.params[rid] = prompt, params
        self.num_known[rid], self.prompt_logprobs[rid] = 0, []
        self.outputs.setdefault(rid, [])
        self.end([answer] if answer else [])
        return True

    def abort(self, rid: str) -> None:
        """Abort a request."""
        self.scheduler.now = self.now
        self.end(self.scheduler.abort(Abort(rid)))

    def apply(self) -> SchedulerOutput:
        """Apply the oldest result."""
        self.applied = self.scheduler.in_flight[0].plan.step
        return super().apply()

    def take_replies(self) -> None:
        """Take the outputs that handing over has for the frontend."""
        replies, self.scheduler.handover.replies = self.scheduler.handover.replies, []
        for output in replies:
            for rid, token in zip(output.rids, output.tokens, strict=True):
                assert rid not in self.finished, "a token after the end"
                self.outputs[rid].append(token)
            for rid, logprobs in output.prompt_logprobs.items():
                self.prompt_logprobs[rid] += [entry.token for entry in logprobs]
            self.end(output.finished)

    def end(self, finished: list[Finished]) -> None:
        """Note ends."""
        super().end(finished)
        self.errors |= {item.rid: item.error for item in finished if item.error is not None}

    def hello(self) -> Hello:
        """Returns the first message on each connection."""
        return Hello(
            engine_id=self.name,
            incarnation=self.incarnation,
            boot_id="",
            work=[] if self.role == "both" else [self.role],
            model="",
            tokenizer="",
            dtype="",
            kv_cache="",
            layers=1,
            kv_heads=2,
            head_dim=1,
            page_size=self.limits.page_size,
            tp=2 if self.has_two_ranks and self.role == "prefill" else 1,
            num_pages=self.limits.num_pages,
            max_seq_len=self.limits.max_seq_len,
            deterministic=False,
            numerics="",
            identity=KVIdentity("0", 0),
            ranks=[],
            nonce=bytes(32),
        )

    def crc(self, page: int) -> int:
        """The checksum of a page."""
        entries = [self.device.kv.get((page, offset)) for offset in range(self.limits.page_size)]
        return zlib.crc32(repr(entries).encode())

    def prepare(self, command: PreparePages) -> None:
        """Put the heads of pages that came in pieces in order, and compare pages with their checksums."""
        self.unprepared.remove(command)
        owned = [page for _, hold in self.machine.leases.holds() for page in hold.own_pages]
        assert set(command.pages) <= set(owned), "pages are made ready that no lease has"
        assert len(command.pieces) in (0, 2)
        if command.pieces:
            for page in command.pages:
                for offset in range(self.limits.page_size):
                    if (entry := self.device.kv.get((page, offset))) is not None:
                        self.device.kv[page, offset] = in_pieces(entry)
        error = ""
        for sums in command.sums:
            found = np.array([self.crc(page) for page in command.pages], np.uint32).tobytes()
            error = "" if found == sums.crcs else "a page differs"
        event = PagesPrepared(ticket=command.ticket, error=error, reason="checksum")
        self.machine.on_rank(event, self.now)

    def check_role(self) -> None:
        """Assert that there is only work of the role, that a change ends in time, and what it refuses."""
        roles, machine = self.scheduler.roles, self.machine
        kinds = {kind_of(r.handoff, r.most_outputs) for r in self.scheduler.requests.values()}
        assert kinds <= WORK[roles.role]
        assert roles.role == "prefill" or not list(machine.offers)
        assert roles.role == "decode" or not list(machine.leases)
        if roles.next_role is not None:
            assert self.now < self.leaving_until, "the old role should be back"
            going = WORK[roles.role] - WORK[roles.next_role]
            for handoff in (Handoff(id=0, part="prefill"), Handoff(id=0, part="decode"), None):
                if kind_of(handoff, 2) in going:
                    assert self._refuses(handoff), "work that goes is taken"

    def _refuses(self, handoff: Handoff | None) -> bool:
        try:
            self.scheduler.roles.check(handoff, 2)
        except RoleChangedError:
            return True
        return False

    def check_memory(self) -> None:
        """Assert that every page, slot and lock has one owner."""
        problems = find_problems(self.scheduler)
        assert problems == [], problems


@dataclass
class Connection:
    """A connection: messages in order in each direction, until it is closed."""

    number: int
    ends: tuple[Worker, Worker]  # the worker that opened it, and the one that accepted it
    queues: tuple[deque[KVMessage], deque[KVMessage]] = field(
        default_factory=lambda: (deque(), deque())
    )  # to end
    is_cut: bool = False
    told: list[bool] = field(default_factory=lambda: [False, False])  # which ends know that it is cut


class Cluster:
    """Workers, connections and the router's bookkeeping of requests."""

    def __init__(
        self,
        random: Random,
        num_prefill: int = 1,
        num_decode: int = 2,
        transport: str = "shm",
        guides: Random | None = None,
        reuses: Random | None = None,
    ) -> None:
        """``guides`` decides which requests have a grammar, and when none can be followed; None: never.

        ``reuses`` decides which requests get the handoff of another prompt, by mistake; None: none.
        """
        self.random, self.guides, self.reuses = random, guides, reuses
        self.transport = transport
        self.cut_at: dict[str, float] = {}  # session -> when its connection was cut
        self.now = 0.0
        self.sizes = {
            "page_size": random.choice([1, 2, 4]),
            "max_running_requests": random.choice([2, 4]),
            "chunked_prefill_size": random.choice([3, 8, 16]),
            "num_pages": random.choice([40, 64]),
            "max_seq_len": 40,
        }
        self.prefix = random.random() < 0.7
        self.workers: dict[str, Worker] = {}
        self.num_incarnations = 0
        self.connections: list[Connection] = []
        self.num_connections = 0
        self.sessions: dict[str, tuple[Worker, Worker]] = {}  # the decode worker and the prefill worker
        self.num_requests = 0
        self.has_checksums = random.random() < 0.5
        self.num_flipped = 0  # pages that were written wrongly
        self.asked: dict[tuple[str, int], Worker] = {}  # (prefill incarnation, lease) -> decode worker
        self.version = 0
        self.num_role_changes = 0
        self.role_replies: list[RoleSet] = []
        self.ended: dict[str, int] = {}
        self.handoffs: dict[str, tuple[int, list[int], SamplingParams, str]] = {}  # rid -> …, prefill worker
        self.has_two_ranks = transport == "nixl" and random.random() < 0.5  # prefill workers
        for index in range(num_prefill):
            self.spawn(f"p{index}", "prefill")
        for index in range(num_decode):
            self.spawn(f"d{index}", "decode")

    def spawn(self, name: str, work: Role) -> Worker:
        """Start a worker, or another one in a dead one's place."""
        self.num_incarnations += 1
        options: dict[str, int] = dict(self.sizes)
        if not self.prefix:
            options["disable_prefix_cache"] = True
        worker = self.workers[name] = Worker(name, work, f"{name}#{self.num_incarnations}", **options)
        worker.has_two_ranks = self.has_two_ranks
        worker.now = self.now
        worker.scheduler.now = self.now
        for number in range(1, self.version + 1):  # it starts with the weights that are served now
            worker.scheduler.weights.commit(str(number), flush_cache=False)
        return worker

    @property
    def prefills(self) -> list[Worker]:
        """The live prefill workers that take requests."""
        return self._workers_of("prefill")

    @property
    def decodes(self) -> list[Worker]:
        """The live decode workers that take requests."""
        return self._workers_of("decode")

    def _workers_of(self, role: Role) -> list[Worker]:
        return [each for each in self.workers.values() if each.role == role and not each.is_leaving]

    # --- what the network does ---

    def flush(self, worker: Worker) -> None:
        """Carry out what a worker wants: messages, connections, and commands to its transport."""
        worker.take_replies()
        peers = worker.machine.peers
        for number, message in peers.messages:
            for connection in self.connections:
                if connection.number == number:
                    self.check_lease(worker, connection.ends[connection.ends[0] is worker], message)
                if connection.number == number and not connection.is_cut:
                    connection.queues[connection.ends[0] is worker].append(message)
        for number, reason in peers.closes:
            causes = ("stuck", "Sent nor Gone", "another connection", "dead", "role has changed")
            assert any(cause in reason for cause in causes), reason
            for connection in [each for each in self.connections if each.number == number]:
                if "role" in reason:
                    self.end_connection(connection, worker)
                else:
                    self.cut(connection)
        commands, peers.commands = peers.commands, []
        for command in commands:
            match command:
                case ConnectPeer():
                    worker.connected.add(command.session)
                case DisconnectPeer():
                    worker.connected.discard(command.session)
                case BanWriters():
                    worker.banned.add(command.session)
                    worker.unproven.add(command.session)
                case PushPages():
                    worker.pushes.append(Push(command))
                case PreparePages():
                    worker.unprepared.append(command)
        connects, peers.connects = peers.connects, []
        peers.messages, peers.closes = [], []
        for address in connects:
            self.connect(worker, address)

    def check_lease(self, worker: Worker, to: Worker, message: KVMessage) -> None:
        """Assert that the last word on a lease goes to the worker that was asked for its pages."""
        match message:
            case ReservePages():
                self.asked[worker.incarnation, message.lease] = to
            case Sent() | Gone() if message.lease:
                assert self.asked[worker.incarnation, message.lease] is to, "another worker's lease is ended"

    def connect(self, worker: Worker, address: str) -> None:
        """Open a connection from a worker to an address."""
        other = self.workers.get(address)
        if other is None or other.role != "prefill" or worker.role != "decode":
            worker.machine.on_unreachable(address, self.now)
            self.flush(worker)
            return
        self.num_connections += 1
        connection = Connection(self.num_connections, (worker, other))
        self.connections.append(connection)
        session = f"s{connection.number}"
        self.sessions[session] = worker, other
        other.machine.on_opened(connection.number, session, None, worker.hello(), self.transport, self.now)
        worker.machine.on_opened(connection.number, session, address, other.hello(), self.transport, self.now)
        self.flush(other)
        self.flush(worker)

    def deliver(self, connection: Connection, to: int) -> None:
        """Deliver the oldest message to one end; after the last one, the end of a cut connection."""
        worker, queue = connection.ends[to], connection.queues[to]
        if self.workers.get(worker.name) is not worker:
            connection.told[to] = True
        elif queue:
            worker.machine.on_message(connection.number, queue.popleft(), self.now)
            self.flush(worker)
        elif connection.is_cut and not connection.told[to]:
            connection.told[to] = True
            worker.machine.on_closed(connection.number, self.now)
            self.flush(worker)
        if all(connection.told) and not any(connection.queues):
            self.connections = [each for each in self.connections if each is not connection]

    def cut(self, connection: Connection) -> None:
        """Cut a connection: a part of what is under way still arrives."""
        connection.is_cut = True
        self.cut_at.setdefault(f"s{connection.number}", self.now)
        for queue in connection.queues:
            for _ in range(self.random.randint(0, len(queue))):
                queue.pop()

    def end_connection(self, connection: Connection, by: Worker) -> None:
        """Close a connection in good order: all that its closer has sent before still arrives."""
        connection.is_cut = True
        end = connection.ends.index(by)
        connection.told[end] = True
        connection.queues[end].clear()

    def ping(self, connection: Connection) -> None:
        """The decode worker's connection asks whether the other end computes, and its thread answers."""
        decode, prefill = connection.ends
        if self.workers.get(prefill.name) is prefill and self.workers.get(decode.name) is decode:
            in_flight = prefill.scheduler.in_flight
            step = in_flight[-1].plan.step if in_flight else 0
            decode.machine.on_message(connection.number, Pong(step=step, busy=bool(in_flight)), self.now)
            self.flush(decode)

    def pending(self) -> list[tuple[Connection, int]]:
        """Returns the ends of connections that something can be delivered to."""
        return [
            (connection, to)
            for connection in self.connections
            for to in (0, 1)
            if connection.queues[to] or (connection.is_cut and not connection.told[to])
        ]

    # --- what the transport does ---

    def movable(self) -> list[tuple[Worker, Push]]:
        """Returns the pushes that may go on: the step that they wait for has ended."""
        return [
            (worker, push)
            for worker in self.workers.values()
            for push in worker.pushes
            if push.command.after_step <= worker.applied
        ]

    def move(self, worker: Worker, push: Push, *, fails: bool = False) -> None:
        """Write one page of a push, or end it; after a failure nothing is written any more."""
        command = push.command
        target = self.sessions[command.session][0]
        if (
            fails
            or self.workers.get(target.name) is not target
            or (command.session in target.banned and command.session not in target.unproven)
        ):
            worker.pushes.remove(push)
            worker.machine.on_rank(PushEnded(ticket=command.ticket, at=self.now, error="it failed"), self.now)
        elif push.num_written < len(command.sources):
            push.crcs.append(worker.crc(command.sources[push.num_written]))
            self.write(worker, target, command, push.num_written)
            push.num_written += 1
        else:
            worker.pushes.remove(push)
            sums = []
            if self.has_checksums:
                crcs = np.array(push.crcs, np.uint32).tobytes()
                sums = [HeadSums(target_rank=0, head=0, num_heads=1, crcs=crcs)]
            worker.machine.on_rank(PushEnded(ticket=command.ticket, at=self.now, sums=sums), self.now)
        self.flush(worker)

    def write(self, source: Worker, target: Worker, command: PushPages, index: int) -> None:
        """Copy one page, after asserting that each side still owns its page."""
        page, to = command.sources[index], command.targets[index]
        assert source.written.get(page, 0) <= command.after_step, "a page is pushed before it is computed"
        assert not source.scheduler.resources.is_free(page), f"page {page} is pushed, but free"
        owners = [
            lease
            for lease, hold in target.machine.leases.holds()
            if to in hold.own_pages and lease.session == command.session
        ]
        assert len(owners) == 1, f"page {to} of {target.name} is written, but no lease of this peer has it"
        assert owners[0].state is not LeaseState.LANDED, "a page is written after Sent"
        for offset in range(self.sizes["page_size"]):
            if (entry := source.device.kv.get((page, offset))) is not None:
                is_split = source.has_two_ranks and TRAITS[self.transport].in_pieces
                target.device.kv[to, offset] = in_pieces(entry) if is_split else entry
            else:
                target.device.kv.pop((to, offset), None)
        if self.has_checksums and self.random.random() < 0.03:
            target.device.kv[to, 0] = 0, "0"
            self.num_flipped += 1

    # --- what clients and operators do, and what fails ---

    def request(self, *, twice: bool) -> None:
        """A client's request is split between a prefill and a decode worker, or by mistake two of these."""
        self.num_requests += 1
        rid = f"r{self.num_requests}"
        stem = self.random.choice([[7] * 30, list(range(30)), [1, 2]])
        prompt = stem[: self.random.randint(1, 28)] + self.random.choices(
            range(50), k=self.random.randint(0, 3)
        )
        params = SamplingParams(
            max_new_tokens=self.random.choice([1, 2, 5, 9]),
            seed=self.random.randint(0, 3),
            stop_token_ids=tuple(self.random.sample(range(50), self.random.choice([0, 4]))),
            prompt_logprobs_start=self.random.choice([-1, -1, 0, 3]),
        )
        if not (self.prefills and self.decodes):
            return
        if self.guides is not None and self.guides.random() < 0.4:
            params = structs.replace(params, grammar=GrammarSpec("regex", "a"))
        source = self.random.choice(self.prefills)
        number = self.num_requests
        own = {used for used, other, *_ in self.handoffs.values() if other == prompt}
        others = [used for used, *_ in self.handoffs.values() if used not in own]
        if self.reuses is not None and others and self.reuses.random() < 0.5:
            number = self.reuses.choice(others)
        self.handoffs[rid] = number, prompt, params, source.name
        self.prefill_leg(rid)
        for worker in self.random.sample(self.decodes, min(1 + twice, len(self.decodes))):
            self.decode_leg(rid, worker)

    def whole_request(self) -> None:
        """A client's request is served by one worker alone."""
        takers = [w for w in self.workers.values() if w.role != "prefill" and not w.is_leaving]
        if not takers:
            return
        self.num_requests += 1
        params = SamplingParams(max_new_tokens=self.random.choice([2, 5]))
        prompt = self.random.choices(range(50), k=self.random.randint(1, 9))
        worker = self.random.choice(takers)
        worker.start(f"r{self.num_requests}", prompt, params, None, salt_of(self.num_requests))
        self.flush(worker)

    def prefill_leg(self, rid: str) -> None:
        """Send the prefill leg to its worker."""
        number, prompt, params, name = self.handoffs[rid]
        worker = self.workers[name]
        worker.start(rid, prompt, params, Handoff(id=number, part="prefill"), salt_of(number))
        self.flush(worker)

    def decode_leg(self, rid: str, worker: Worker) -> None:
        """Send the decode leg to a worker."""
        number, prompt, params, name = self.handoffs[rid]
        whole = self.random.random() < 0.3
        handoff = Handoff(id=number, part="decode", peer=name, whole=whole)
        worker.start(rid, prompt, params, handoff, salt_of(number))
        self.flush(worker)

    def live(self) -> list[tuple[Worker, str]]:
        """Returns all legs that have not ended."""
        return [(worker, rid) for worker in self.workers.values() for rid in worker.scheduler.requests]

    def kill(self, worker: Worker) -> None:
        """Kill a worker; another one takes its place. Its connections and transfers end at any point."""
        for connection in self.connections:
            if worker in connection.ends:
                connection.told[connection.ends.index(worker)] = True
                connection.queues[connection.ends.index(worker)].clear()
                self.cut(connection)
        del self.workers[worker.name]
        self.num_role_changes -= worker.is_leaving  # nobody answers
        parts = [(rid, request.handoff) for rid, request in worker.scheduler.requests.items()]
        lost = [rid for rid, handoff in parts if handoff is not None and handoff.part == "decode"]
        self.spawn(worker.name, worker.scheduler.config.role)
        for rid in lost:  # the router sends a lost decode leg to another worker
            if takers := [each for each in self.decodes if rid not in each.prompts]:
                self.decode_leg(rid, self.random.choice(takers))

    def silent(self) -> list[tuple[Worker, str]]:
        """Returns the sessions that a decode worker's transport can prove to have no writer any more."""
        found = []
        for worker in self.workers.values():
            for session in sorted(worker.unproven):
                source = self.sessions[session][1]
                is_dead = self.workers.get(source.name) is not source
                if is_dead or not any(push.command.session == session for push in source.pushes):
                    found.append((worker, session))
        return found

    def prove(self, worker: Worker, session: str) -> None:
        """A decode worker's transport reports that a session has no writer any more."""
        worker.unproven.remove(session)
        worker.machine.on_rank(WritersGone(session=session), self.now)
        self.flush(worker)

    def new_weights(self, mode: PauseMode) -> None:
        """All workers get new weights, and serve them from different times on."""
        if any(worker.wants_commit for worker in self.workers.values()):
            return
        self.version += 1
        for worker in self.workers.values():
            worker.wants_commit, worker.commit_mode = str(self.version), mode
            worker.scheduler.weights.is_updating = True

    def begin_commit(self, worker: Worker) -> None:
        """The trainer asks a worker for the commit."""
        if worker.commit_mode is not None:
            worker.scheduler.weights.hold(worker.commit_mode)
            worker.commit_mode = None
            self.advance(worker)

    def pause(self, worker: Worker, mode: PauseMode) -> None:
        """The operator pauses a worker."""
        worker.scheduler.control.hold("user", mode)
        self.advance(worker)

    def advance(self, worker: Worker) -> None:
        """Let pauses and commits go on, and apply what is due."""
        worker.now = worker.scheduler.now = self.now
        for reply in worker.scheduler.control.advance(self.now):
            worker.end(getattr(reply, "finished", []))
        weights = worker.scheduler.weights
        if worker.wants_commit is not None and worker.commit_mode is None and weights.stands_still:
            flush = worker.scheduler.control.holders["weight_commit"] == "retract"
            weights.commit(worker.wants_commit, flush_cache=flush)
            worker.wants_commit, weights.is_updating = None, False
            weights.release()
            for reply in worker.scheduler.control.advance(self.now):
                worker.end(getattr(reply, "finished", []))
        worker.machine.advance(self.now)
        roles = worker.scheduler.roles
        if roles.due(self.now) is not None:
            roles.enter(None)
        self.role_replies += roles.replies
        roles.replies = []
        self.flush(worker)

    def change_role(self, worker: Worker, role: Role, timeout_s: float) -> None:
        """The operator gives a worker another role."""
        self.num_role_changes += 1
        worker.scheduler.roles.set(SetRole(self.num_role_changes, role, timeout_s), self.now)
        worker.leaving_until = self.now + timeout_s
        self.advance(worker)

    def step(self, worker: Worker) -> None:
        """Launch a step or read the oldest result."""
        worker.now = worker.scheduler.now = self.now
        if len(worker.results) == 2 or (worker.results and self.random.random() < 0.5):
            worker.apply()
        elif worker.launch() is None and worker.scheduler.control.runs and not worker.scheduler.can_guide:
            assert worker.results or worker.scheduler.wake_at is not None, "nothing wakes the loop"
        self.flush(worker)
        self.advance(worker)

    def pass_time(self, seconds: float) -> None:
        """Move the clock of all workers; what was under way on connections that were cut long ago fails."""
        self.now += seconds
        if not TRAITS[self.transport].proves_gone:
            for worker in self.workers.values():
                for push in list(worker.pushes):
                    if self.cut_at.get(push.command.session, inf) + LOST_S <= self.now:
                        self.move(worker, push, fails=True)
        for worker in list(self.workers.values()):
            self.advance(worker)

    def outlast_memory(self) -> None:
        """Wait until no handoff is remembered; by then, what was under way has arrived."""
        while pending := self.pending():
            self.deliver(*pending[0])
        self.pass_time(REMEMBERED_S + 1)

    # --- a run ---

    def act(self, *, faults: bool = True, more: Sequence[str] = (), times: Sequence[float] = TIMES) -> None:
        """Do one random thing.

        ``faults``: it may be a fault, a pause or an update; ``more``: it may be one of these too; ``times``:
        the seconds by which the clock may move.
        """
        random = self.random
        if self.guides is not None and self.guides.random() < 0.05:
            scheduler = self.guides.choice(list(self.workers.values())).scheduler
            scheduler.can_guide = not scheduler.can_guide
        kinds = ["step"] * 10 + ["deliver"] * 10 + ["move"] * 6 + ["request"] * 3 + ["time"] * 2
        # seldom where pieces are put in order, so that some requests end meanwhile
        prepares = ["prepare"] * (1 if self.has_two_ranks else 3 * self.has_checksums)
        kinds += [*more, *prepares, "ping"]
        if faults:
            kinds += [
                "abort",
                "fail",
                "cut",
                "kill",
                "dead",
                "dead",
                "weights",
                "pause",
                "continue",
                "continue",
            ]
        match random.choice(kinds):
            case "role":
                workers, names = list(self.workers.values()), list(WORK)
                worker, role = random.choice(workers), random.choice(names)
                self.change_role(worker, role, timeout_s=random.choice([0.0, 2.0, 30.0]))
            case "step":
                self.step(random.choice(list(self.workers.values())))
            case "deliver":
                if pending := self.pending():
                    self.deliver(*random.choice(pending))
            case "move":
                if movable := self.movable():
                    self.move(*random.choice(movable))
            case "ping":
                if open_ones := [each for each in self.connections if not each.is_cut]:
                    self.ping(random.choice(open_ones))
            case "prepare":
                if preparing := [worker for worker in self.workers.values() if worker.unprepared]:
                    worker = random.choice(preparing)
                    worker.prepare(random.choice(worker.unprepared))
                    self.flush(worker)
            case "request":
                if random.random() < 0.1:
                    self.whole_request()
                else:
                    self.request(twice=faults and random.random() < 0.3)
            case "time":
                self.pass_time(random.choice(times))
                if self.reuses is not None and self.reuses.random() < 0.15:
                    self.outlast_memory()
            case "abort":
                if live := self.live():
                    worker, rid = random.choice(live)
                    worker.abort(rid)
                    self.flush(worker)
            case "fail":
                if movable := self.movable():
                    self.move(*random.choice(movable), fails=True)
            case "cut":
                if self.connections and random.random() < 0.5:
                    self.cut(random.choice(self.connections))
            case "kill":
                if random.random() < 0.4:
                    self.kill(random.choice(list(self.workers.values())))
            case "dead":
                if silent := self.silent():
                    self.prove(*random.choice(silent))
            case "weights":
                self.new_weights(random.choice(["in_place", "retract"]))
                for worker in self.workers.values():
                    self.begin_commit(worker)
            case "pause":
                if random.random() < 0.5:
                    self.pause(
                        random.choice(list(self.workers.values())),
                        random.choice(["wait", "in_place", "retract", "abort"]),
                    )
            case "continue":
                worker = random.choice(list(self.workers.values()))
                worker.scheduler.control.release("user")
                self.advance(worker)
        self.check()

    def check(self) -> None:
        """Assert what must hold at any time."""
        for worker in self.workers.values():
            worker.check_memory()
            worker.check_role()
            for rid, output in worker.outputs.items():
                assert output == worker.expected(rid)[: len(output)], f"{rid} on {worker.name}"

    def settle(self) -> None:
        """Let everything that is under way end without further faults, and assert that nothing is left."""
        for worker in self.workers.values():
            while worker.results:
                worker.apply()
            worker.scheduler.control.release("user")
            worker.scheduler.can_guide = True
            self.begin_commit(worker)
            self.advance(worker)
        for turn in range(500):
            moved = False
            for worker, session in self.silent():
                self.prove(worker, session)
            for worker in list(self.workers.values()):
                for _ in range(4):
                    moved |= worker.launch() is not None
                    while worker.results:
                        worker.apply()
                    self.flush(worker)
                    self.advance(worker)
            while pending := self.pending():
                self.deliver(*pending[0])
                moved = True
            while movable := self.movable():
                self.move(*movable[0])
                moved = True
            for worker in self.workers.values():
                while worker.unprepared:
                    worker.prepare(worker.unprepared[0])
                    moved = True
            if not moved:
                leaving = any(worker.is_leaving for worker in self.workers.values())
                if not (self.live() or self.left() or leaving):
                    break
                self.pass_time(1.0)
                assert turn < 450, f"after {self.now} s there are {self.live()} and {self.left()}"
        self.check()
        assert len(self.role_replies) == self.num_role_changes, "each change of a role is answered once"
        for worker in self.workers.values():
            self.check_ends(worker)

    def left(self) -> list[str]:
        """Returns what offers and leases still own."""
        return [
            f"{worker.name}: {name}"
            for worker in self.workers.values()
            for name, _ in worker.scheduler.handover.holds()
        ]

    def check_ends(self, worker: Worker) -> None:
        """Assert that every request has ended as it should, and that all pages are free or cached."""
        resources = worker.scheduler.resources
        assert len(resources.free_pages) + resources.prefix.num_pages == worker.limits.num_pages
        assert resources.prefix.num_evictable == resources.prefix.num_pages
        assert len(worker.pushes) == 0
        for rid, finished in worker.finished.items():
            expected, output = worker.expected(rid), worker.outputs[rid]
            match finished.reason:
                case "handoff":
                    assert output == expected[:1] and len(expected) > 1
                case "length" | "stop":
                    assert output == expected
                case "error" if rid in worker.without_pages:
                    assert finished.error == "KVCapacityLostError"
                case "error":
                    assert finished.error == "HandoverError" and output == []
            first = worker.params[rid].prompt_logprobs_start
            if first >= 0 and finished.reason in ("length", "stop", "handoff"):
                assert worker.prompt_logprobs[rid] == worker.prompts[rid][max(1, first) :], rid
