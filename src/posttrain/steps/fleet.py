"""A stream of requests over a crew of samplers, which goes on while the trainer works and while samplers come and go."""

from __future__ import annotations

import heapq
import time
from collections import ChainMap, Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Self

from posttrain.asynchrony.passes import Awaited, Passes, Place
from posttrain.errors import RunStopped
from posttrain.interfaces.crew import Crew, Order, SamplerLost, Turned
from posttrain.interfaces.rollout_engine import Request, check_requests
from posttrain.records.trajectories import SamplingParams, Trajectory, Unfinished
from posttrain.steps.posts import TURN_S, Post, TurnLength, longer

MOST_LOSSES = 3  # of samplers in a row by a request that gained no token in between
MOST_HOMES = 100_000  # conversations whose sampler is remembered; older ones go to any


class Fleet:
    """See interfaces.rollout_engine.RequestStream, but for ``close``. For one thread.

    A request goes to the sampler with the fewest; a conversation stays where its first turn was. When a sampler is lost its
    requests go to others with the tokens that it had reported.

    Args: finishes, responses end before a rest, instead of continuing after it; record(event, post, values) takes decisions for
        schedule.jsonl; again, the recorded ones that are made once more.
    """

    def __init__(
        self,
        crew: Crew,
        sampling: SamplingParams,
        *,
        hear: Callable[[], None],
        record: Callable[..., None],
        finishes: bool = False,
        again: Passes | None = None,
    ):
        self.tokens = 0  # sampled so far
        self.busy_s = 0.0  # of all samplers
        self.lost = 0  # samplers
        self.resting = False
        self._finishes = finishes
        self._crew, self._sampling, self._hear, self._record, self._again = crew, sampling, hear, record, again
        self._posts: list[Post] = []
        self._at: dict[str, Post] = {}  # by sample id
        self._length = TurnLength()
        self._hurried = False  # until the rest is over
        self._joined = 0
        self._pool: dict[str, Request] = {}  # without a sampler
        self._withdrawn: set[str] = set()  # to be cancelled, when recorded orders are given again
        self._homes: dict[str, Post] = {}  # by conversation, the newest last
        self._begun: dict[str, Unfinished] = {}  # by sample id, as reported
        self._losses: Counter[str] = Counter()
        self._ended: list[Trajectory] = []

    # ------------------------------------------------------------------------------------------ the stream

    def submit(self, requests: Sequence[Request]) -> None:
        check_requests(requests, ChainMap[str, Any](self._pool, self._at))
        for request in requests:
            self._pool[request.sample_id] = request
            if request.begun:
                self._begun[request.sample_id] = request.begun

    def wait(self, timeout_s: float) -> list[Trajectory]:
        """Return what has ended, after one of a sampler's turns or the time; nothing while all samplers are gone.

        Raises: RunStopped when a request has lost several samplers without a token in between; what sampling raises.
        """
        began = time.thread_time()
        self._drop_the_lost()
        if not self.resting:
            self._give_orders()
        turns = 0 if self._ended else self._collect(min(timeout_s, TURN_S))
        self._length.note(time.thread_time() - began, turns)
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, sample_ids: Collection[str]) -> None:
        wanted = set(sample_ids)
        for name in dict.fromkeys(sample_ids):
            self._pool.pop(name, None)
            if name in self._at:
                self._withdraw(self._at[name], name)
        self._ended = [each for each in self._ended if each.sample_id not in wanted]

    def cancel_groups(self, serials: Collection[int]) -> None:
        """Drop the requests of groups' samples."""
        gone = {str(serial) for serial in serials}
        if gone:
            self.cancel([name for name in (*self._pool, *self._at) if name.partition("/")[0] in gone])

    def progress(self) -> list[Unfinished]:
        """The tokens of all unfinished requests, as last reported."""
        return list(self._begun.values())

    def close(self) -> None:
        """No-op: the runtime ends the samplers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------ between turns

    def at_rest(self) -> bool:
        """Bring all samplers to rest, a little with every call; True once they are, and all that has ended was returned by
        ``wait``. ``go`` ends it.

        With ``finishes`` the responses that were sent end first, and no other is sent.
        """
        self._drop_the_lost()
        self._hurry()
        self._collect(TURN_S / 10)
        self.resting = self._again is None or all(self._may_rest(post) for post in self._posts)
        if self._finishes and self._again is None:
            self._unsend()
            if any(post.asked for post in self._posts):
                self._give_orders(new=False)
        if not self.resting or self._ended or any(post.turn is not None for post in self._posts):
            return False
        resting = {self._crew.call(post.member, "rest"): post for post in self._posts if not post.member.trouble}
        while resting:
            resting = {promise: post for promise, post in resting.items() if not post.member.trouble}
            for promise in self._crew.ready(list(resting), TURN_S) if resting else ():
                post = resting.pop(promise)
                try:
                    post.passes = self._crew.value(post.member, promise)
                except SamplerLost:
                    continue
                self._record("rest", post.number, {"pass": post.passes})
                if post.script and post.script.until is not None:
                    post.script.follow("rest")
        return True

    def _hurry(self) -> None:
        """Have turns that would last longer end now; those of a replay end at their passes."""
        if self._hurried or self._again is not None:
            return
        late = [post for post in self._posts if post.turn is not None and not post.member.trouble]
        for post in late if self._turn_s > TURN_S else ():
            self._crew.hurry(post.member)
        self._hurried = True

    def go(self) -> None:
        self.resting = self._hurried = False

    def will_take_in(self, awaited: Awaited) -> bool:
        """Tell whether a sampler is still to join before this choice of a step, as in the recorded run. The rest that ends the
        step comes after its last choice."""
        joins = self._again.joined.get(self._joined) if self._again else None
        rests = any(post.script is not None and post.script.rests(awaited) for post in self._posts)
        return rests or (joins is not None and joins.awaited == awaited)

    def takes_in(self, awaited: Awaited) -> bool:
        """Tell whether that is now: all samplers have come to its rest, or all are lost."""
        due = [post.script.due(post.passes) for post in self._posts if post.script and post.turn is None]
        rests = len(due) == len(self._posts) and all(each is not None and each.kind == "rest" for each in due)
        return rests and not self._ended and self.will_take_in(awaited)

    def served(self, version: int, content_hash: str) -> None:
        """All members of the crew have echoed these weights; new ones take their posts.

        Raises: RunStopped when the crew has fewer than the run that is replayed had.
        """
        if self._again and not self._joined and len(self._crew.members()) < self._again.most:
            raise RunStopped(
                f"the run that is replayed had {self._again.most} samplers at a time, and this one has "
                f"{len(self._crew.members())}: its orders name each of them; give it as many devices or servers"
            )
        here = {post.member for post in self._posts}
        passes = {post.number: post.passes for post in self._posts}
        for member in self._crew.members():
            if member in here or member.trouble:
                continue
            joined = self._again.joined.get(self._joined) if self._again else None
            if self._again and not (joined and joined.version == version and joined.rested.items() <= passes.items()):
                continue  # it joined later in the recorded run, maybe with the same weights, or not at all
            script = self._again.post(self._joined) if self._again else None
            self._posts.append(Post(self._joined, member, script=script))
            self._record("joined", self._joined, {"version": version, "name": member.name})
            self._joined += 1
        for post in self._posts:
            if not post.member.trouble:
                self._record("weights", post.number, {"pass": post.passes, "version": version, "hash": content_hash})

    @property
    def samplers(self) -> int:
        return sum(not post.member.trouble for post in self._posts)

    @property
    def named(self) -> str:
        """The samplers with requests, for messages."""
        busy = [f"{post.member.name} ({len(post.asked)})" for post in self._posts if post.asked]
        return ", ".join(busy) or "none"

    # ------------------------------------------------------------------------------------------ turns

    @property
    def _turn_s(self) -> float:
        """Seconds of the next turn of a sampler."""
        return TURN_S if self._hurried else self._length.of(len(self._posts))

    def _give_orders(self, *, new: bool = True) -> None:
        posts = [post for post in self._posts if not post.member.trouble]
        if new and posts and self._again is None:
            fewest = [(len(post.asked), place) for place, post in enumerate(posts)] if self._pool else []
            heapq.heapify(fewest)
            for request in self._pool.values():
                self._give(self._home(request, posts, fewest), request)
            self._pool.clear()
        for post in posts:
            if post.turn is None and (order := self._again_of(post) if self._again else self._order(post, new=new)):
                post.turn = self._crew.call(post.member, "turn", order)

    def _order(self, post: Post, *, new: bool) -> Order | None:
        if not (post.asked or post.cancelled):
            return None
        order = Order(
            sampling=self._sampling,
            new=tuple(post.new) if new else (),
            cancelled=tuple(post.cancelled),
            timeout_s=self._turn_s,
        )
        self._note_order(post, order)
        post.cancelled = []
        post.new = [] if new else post.new
        return order

    def _again_of(self, post: Post) -> Order | None:
        """The recorded order of a sampler, once it has come to its pass and all that it names is there."""
        assert post.script is not None
        due = post.script.due(post.passes)
        if due is None:
            if not post.asked:
                return None
            return Order(sampling=self._sampling, timeout_s=TURN_S, until_pass=post.script.until)
        if due.kind == "lost":
            self._leave(post)
            return None
        here = self._pool.keys() >= set(due.sent) and self._withdrawn >= set(due.cancelled)
        if due.kind != "order" or not here or not all(map(self._was_given, due.behind)):
            return None
        for name in due.sent:
            self._give(post, self._pool.pop(name))
        post.new.clear()
        for name in due.cancelled:
            self._withdrawn.discard(name)
            self._forget(post, name)
        post.script.follow("order")
        order = Order(
            sampling=self._sampling,
            new=tuple(post.asked[name] for name in due.sent),
            cancelled=due.cancelled,
            timeout_s=TURN_S,
            until_pass=post.script.until,
        )
        self._note_order(post, order)
        return order

    def _was_given(self, order: Place) -> bool:
        """Tell whether a recorded order was given again: requests go to a sampler that will be lost with them first."""
        post = next((each for each in self._posts if each.number == order.sampler), None)
        if post is None or post.script is None:
            return order.sampler < self._joined  # it has left
        return post.script.is_past(order.number)

    def _note_order(self, post: Post, order: Order) -> None:
        if order.new or order.cancelled:
            sent = [request.sample_id for request in order.new]
            self._record("order", post.number, {"pass": post.passes, "sent": sent, "cancelled": list(order.cancelled)})

    def _may_rest(self, post: Post) -> bool:
        """Tell whether the recorded run let this sampler rest now; of the last validation it has recorded no rest."""
        assert post.script is not None
        due = post.script.due(post.passes)
        return post.turn is None and (post.script.until is None or (due is not None and due.kind == "rest"))

    def _collect(self, timeout_s: float) -> int:
        """Take in the turns that are over. Returns: their number."""
        turns = {post.turn: post for post in self._posts if post.turn is not None}
        if not turns:
            time.sleep(min(timeout_s, TURN_S / 10))
            return 0
        over = self._crew.ready(list(turns), timeout_s)
        for promise in over:
            self._take(turns[promise])
        return len(over)

    def _take(self, post: Post) -> None:
        promise, post.turn = post.turn, None
        try:
            turned: Turned = self._crew.value(post.member, promise)
        except SamplerLost:
            return
        post.passes = turned.passes
        self.busy_s += turned.busy_s
        self.tokens += turned.tokens
        if turned.tokens or turned.ended:
            self._hear()
        again = set(turned.again)
        for each in turned.grown:
            if each.sample_id in post.asked:
                before = None if each.sample_id in again else self._begun.get(each.sample_id)
                self._begun[each.sample_id] = longer(before, each)
                self._losses.pop(each.sample_id, None)
        for one in turned.ended:
            if self._forget(post, one.sample_id):
                self._begun.pop(one.sample_id, None)
                self._losses.pop(one.sample_id, None)
                self._ended.append(one)

    def _give(self, post: Post, request: Request) -> None:
        post.asked[request.sample_id] = request
        self._at[request.sample_id] = post
        post.new.append(request)

    def _forget(self, post: Post, name: str) -> bool:
        """Take a request from a sampler. Returns: True where it had it."""
        self._at.pop(name, None)
        return post.asked.pop(name, None) is not None

    def _withdraw(self, post: Post, name: str) -> None:
        self._begun.pop(name, None)
        if self._again is not None:
            self._withdrawn.add(name)
            return
        sent = name not in {request.sample_id for request in post.new}
        post.new = [request for request in post.new if request.sample_id != name]
        self._forget(post, name)
        if sent:
            post.cancelled.append(name)

    def _home(self, request: Request, posts: Sequence[Post], fewest: list[tuple[int, int]]) -> Post:
        """The sampler of a request. Args: fewest, a heap of the requests of each one, which may be more by now, and its place."""
        home = self._homes.pop(request.conversation, None) if request.conversation else None
        if home is None or home not in posts:
            while (count := len(posts[fewest[0][1]].asked)) != fewest[0][0]:
                heapq.heapreplace(fewest, (count, fewest[0][1]))
            home = posts[fewest[0][1]]
        if request.conversation:
            self._homes[request.conversation] = home
            if len(self._homes) > MOST_HOMES:
                del self._homes[next(iter(self._homes))]
        return home

    # ------------------------------------------------------------------------------------------ losses

    def _drop_the_lost(self) -> None:
        for post in [each for each in self._posts if each.member.trouble]:
            self._record("lost", post.number, {"pass": post.passes, "reason": post.member.trouble})
            self.lost += 1
            self._posts.remove(post)
            for name in post.asked:
                self._losses[name] += 1
                if self._losses[name] == MOST_LOSSES:
                    raise RunStopped(
                        f"{post.member.name} {post.member.trouble}\nIt is the sampler number {MOST_LOSSES} that is lost while it "
                        f"sampled {name} without a token of it in between: it is not tried again"
                    )
            self._return_to_pool(post)
            self._crew.drop(post.member)

    def _leave(self, post: Post) -> None:
        """A sampler that the recorded run lost here gives its requests away, and serves as the one that joined for it."""
        self._record("lost", post.number, {"pass": post.passes, "reason": "as in the run that is replayed"})
        self.lost += 1
        self._posts.remove(post)
        self._return_to_pool(post)
        self._crew.value(post.member, self._crew.call(post.member, "leave"))

    def _unsend(self) -> None:
        for post in self._posts:
            for request in post.new:
                self._forget(post, request.sample_id)
                self._pool[request.sample_id] = request
            post.new = []

    def _return_to_pool(self, post: Post) -> None:
        for name, request in post.asked.items():
            self._at.pop(name, None)
            self._pool[name] = replace(request, begun=self._begun.get(name, request.begun))
