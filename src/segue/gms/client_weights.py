"""The calls of a client about weights: leases to write them, generations to read, and offers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from segue.gms import messages as wire
from segue.gms.client_connection import ServiceConnection
from segue.gms.lock_state import AskMode
from segue.gms.manifest import WeightsManifest, decode_manifest, encode_manifest
from segue.gms.transport import close, packed


class WeightCalls(ServiceConnection):
    """The calls about weights; see :class:`segue.gms.client.GmsClient`."""

    def ask(
        self,
        manifest: WeightsManifest,
        mode: AskMode = "rw_or_ro",
        *,
        wait_s: float = 3600.0,
        update_epoch: int | None = None,
        on_wait: Callable[[int], None] = lambda position: None,
    ) -> wire.WeightsGranted:
        """Ask for weights, as rank 0; with `update_epoch`, for a generation beside the current one.

        Args:
            manifest: what the engine wants, without digests.
            mode: to load, to read, or whichever is possible.
            wait_s: how long another engine's load is waited for.
            update_epoch: the engine's epoch.
            on_wait: called every five seconds of waiting.
        """
        message = wire.AskWeights(
            call=self._next(),
            mode=mode,
            is_update=update_epoch is not None,
            epoch=update_epoch or 0,
            wait_s=wait_s,
        )
        descriptor = packed(encode_manifest(manifest))
        try:
            return self._one(message, wire.WeightsGranted, [descriptor], wait_s=wait_s, on_wait=on_wait)
        finally:
            close([descriptor])

    def join(self, lease: int) -> wire.WeightsGranted:
        """Join the lease of rank 0."""
        return self._one(wire.JoinLease(call=self._next(), lease=lease), wire.WeightsGranted)

    def allocate(self, lease: int, sizes: Sequence[int], *, wait_s: float = 0.0) -> list[int]:
        """Return the descriptors of new slabs, which the caller closes."""
        message = wire.AllocateSlabs(call=self._next(), lease=lease, sizes=list(sizes), wait_s=wait_s)
        return self._slabs(message, wait_s=wait_s)[1]

    def export(self, generation: int, rank: int) -> tuple[list[int], list[int]]:
        """Return the sizes and descriptors of a committed generation's slabs; the caller closes these."""
        return self._slabs(wire.ExportSlabs(call=self._next(), generation=generation, rank=rank))

    def manifest(self, generation: int, rank: int) -> WeightsManifest:
        """Return the manifest of a rank of a committed generation."""
        message = wire.GetManifest(call=self._next(), generation=generation, rank=rank)
        return decode_manifest(self._file(message, wire.ManifestGiven))

    def seal(self, lease: int, manifest: WeightsManifest, places: Sequence[int] | None = None) -> list[int]:
        """Make the slabs final, which are unmapped; returns the ranks that have not done so yet.

        `places` are the numbers of the slabs that an update has taken, in this order; it shares the others.
        """
        descriptor = packed(encode_manifest(manifest))
        try:
            numbers = None if places is None else list(places)
            message = wire.SealRank(call=self._next(), lease=lease, places=numbers)
            return self._one(message, wire.RankSealed, [descriptor]).missing
        finally:
            close([descriptor])

    def commit(self, lease: int, weight_version: str = "", model_path: str | None = None) -> int:
        """Make the lease's generation the current one, as rank 0; returns its number."""
        message = wire.CommitLease(
            call=self._next(), lease=lease, weight_version=weight_version, model_path=model_path
        )
        return self._one(message, wire.GenerationNumber).generation

    def abort(self, lease: int, *, is_abandoned: bool = False) -> None:
        """Give a lease to write up; `is_abandoned`: this process may still write to its slabs."""
        message = wire.AbortLease(call=self._next(), lease=lease, is_abandoned=is_abandoned)
        self._one(message, wire.CallDone)

    def rename(self, generation: int, epoch: int, weight_version: str) -> None:
        """Give the current generation of the cohort another version."""
        message = wire.RenameGeneration(
            call=self._next(), generation=generation, epoch=epoch, weight_version=weight_version
        )
        self._one(message, wire.GenerationNumber)

    def progress(self, lease: int, num_bytes: int) -> None:
        """Report the bytes that were loaded; a rank must do so at least once per minute."""
        message = wire.ReportProgress(call=self._next(), lease=lease, num_bytes=num_bytes)
        self._one(message, wire.CallDone)

    def pin(self, generation: int) -> None:
        """Keep a committed generation."""
        self._one(wire.PinGeneration(call=self._next(), generation=generation), wire.GenerationNumber)

    def unpin(self, generation: int) -> None:
        """Give a generation up, which is unmapped."""
        self._one(wire.UnpinGeneration(call=self._next(), generation=generation), wire.GenerationNumber)

    def offer(
        self,
        generation: int,
        manifest: WeightsManifest,
        descriptors: Sequence[int],
        *,
        epoch: int,
        is_loaded: bool,
        weight_version: str = "",
        model_path: str | None = None,
    ) -> int:
        """Offer what this rank reads to a service that has lost it; returns the number that it has now.

        The number is 0 until all ranks of the engine have offered theirs: then this must be called again. The
        refusal "other" means that the cohort has other weights, which are newer.
        """
        packed_manifest = packed(encode_manifest(manifest))
        step, number = wire.MAX_DESCRIPTORS - 1, 0
        try:
            for first in range(0, max(len(descriptors), 1), step):
                message = wire.OfferRank(
                    call=self._next(),
                    generation=generation,
                    first=first,
                    epoch=epoch,
                    is_loaded=is_loaded,
                    weight_version=weight_version,
                    model_path=model_path,
                )
                sent = [packed_manifest, *descriptors[first : first + step]]
                number = self._one(message, wire.GenerationNumber, sent).generation
        finally:
            close([packed_manifest])
        return number

    def _slabs(self, message: wire.Message, wait_s: float = 0.0) -> tuple[list[int], list[int]]:
        descriptors: list[int] = []
        parts = self._parts(message, wire.SlabsGiven, descriptors, wait_s + self.target.reply_s)
        return [size for part in parts for size in part.sizes], descriptors
