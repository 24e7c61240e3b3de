/* The emulated HCCL: how ranks wait for each other and exchange bytes.
 *
 * A wait for a rank that is gone fails at once with HCCL_E_REMOTE, and a wait for one
 * that lives but does not come fails with HCCL_E_TIMEOUT. Either way the communicator
 * is broken from then on, as a real one is.
 */
#define _GNU_SOURCE /* syscall */

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "communicator.h"

_Static_assert((CHANNEL_BYTES & (CHANNEL_BYTES - 1)) == 0,
               "counters wrap at a multiple");

/* --- Waiting ------------------------------------------------------------------ */

enum { LIVENESS_CHECK_NANOSECONDS = 100 * 1000 * 1000 };

static void ring(HcclComm comm, uint32_t rank)
{
    atomic_uint *doorbell = &comm->header->doorbells[rank];
    atomic_fetch_add(doorbell, 1);
    syscall(SYS_futex, doorbell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void ring_all(HcclComm comm)
{
    for (uint32_t rank = 0; rank < comm->ranks; rank++) {
        ring(comm, rank);
    }
}

static HcclResult fail(HcclComm comm, HcclResult error, const char *what, uint32_t peer)
{
    comm->error = error;
    fprintf(stderr, "[NPU emulator] rank %u of communicator %s: rank %u %s\n",
            comm->rank, comm->name, peer, what);
    return error;
}

/* Bit r is set where progress depends on rank r; 0 where the wait is over. */
typedef uint64_t (*pending_fn)(HcclComm comm, void *context);

/* Wait until pending answers 0, asking it again after each ring of the doorbell. CANN's
 * own limit, 1836 s, is too long for a test to hang. */
static HcclResult wait_until_done(HcclComm comm, pending_fn pending, void *context)
{
    atomic_uint *doorbell = &comm->header->doorbells[comm->rank];
    const struct timespec interval = {.tv_nsec = LIVENESS_CHECK_NANOSECONDS};
    double deadline = seconds_now() + timeout_seconds("HCCL_EXEC_TIMEOUT", 300);
    uint64_t gone_before = 0;
    for (;;) {
        unsigned rings = atomic_load(doorbell);
        uint64_t peers = pending(comm, context);
        if (peers == 0) {
            return HCCL_SUCCESS;
        }
        /* Seen gone before pending was asked: nothing of it can still be to come. */
        if (peers & gone_before) {
            return fail(comm, HCCL_E_REMOTE, "ended or left",
                        (uint32_t)__builtin_ctzll(peers & gone_before));
        }
        if (seconds_now() > deadline) {
            return fail(comm, HCCL_E_TIMEOUT, "did not take part in time",
                        (uint32_t)__builtin_ctzll(peers));
        }
        if (syscall(SYS_futex, doorbell, FUTEX_WAIT, rings, &interval, NULL, 0) == 0 ||
            errno != ETIMEDOUT) {
            continue; /* rung */
        }
        for (uint32_t rank = 0; rank < comm->ranks; rank++) {
            if (((peers >> rank) & 1) && is_gone(comm, rank)) {
                gone_before |= 1ULL << rank;
            }
        }
    }
}

static uint64_t all_peers(HcclComm comm)
{
    uint64_t everyone = comm->ranks == 64 ? ~0ULL : (1ULL << comm->ranks) - 1;
    return everyone & ~(1ULL << comm->rank);
}

/* --- Rounds of a collective --------------------------------------------------- */

/* Slots alternate between two rounds. A rank that writes round r + 2 has seen every
 * other publish r + 1, hence finish reading r: one barrier for each round is enough. */
static char *slot_in_round(HcclComm comm, unsigned round, uint32_t rank)
{
    return comm->slots + ((round % 2) * (size_t)comm->ranks + rank) * SLOT_BYTES;
}

void *slot_of(HcclComm comm, uint32_t rank)
{
    return slot_in_round(comm, atomic_load(&comm->header->rounds) - 1, rank);
}

static uint64_t round_pending(HcclComm comm, void *context)
{
    unsigned begun = *(unsigned *)context;
    return atomic_load(&comm->header->rounds) == begun ? all_peers(comm) : 0;
}

HcclResult publish(HcclComm comm, const void *data, size_t bytes)
{
    if (comm->error) {
        return comm->error;
    }
    struct header *header = comm->header;
    unsigned round = atomic_load(&header->rounds);
    memcpy(slot_in_round(comm, round, comm->rank), data, bytes);
    if (atomic_fetch_add(&header->arrived, 1) + 1 == comm->ranks) {
        atomic_store(&header->arrived, 0);
        atomic_store(&header->rounds, round + 1);
        ring_all(comm);
        return HCCL_SUCCESS;
    }
    return wait_until_done(comm, round_pending, &round);
}

/* --- Point-to-point ----------------------------------------------------------- */

static char *channel_bytes(HcclComm comm, uint32_t from, uint32_t to)
{
    return comm->channel_data + ((size_t)from * comm->ranks + to) * CHANNEL_BYTES;
}

/* Copy between a message and the ring of a channel, around its end where need be. */
static void copy_ring(char *ring_data, unsigned position, char *message, size_t bytes,
                      HcclSendRecvType direction)
{
    while (bytes > 0) {
        size_t start = position % CHANNEL_BYTES;
        size_t piece = CHANNEL_BYTES - start < bytes ? CHANNEL_BYTES - start : bytes;
        if (direction == HCCL_SEND) {
            memcpy(ring_data + start, message, piece);
        } else {
            memcpy(message, ring_data + start, piece);
        }
        position += (unsigned)piece;
        message += piece;
        bytes -= piece;
    }
}

/* Move what the channel holds, or has room for. */
static void advance(HcclComm comm, struct transfer *transfer)
{
    int sends = transfer->direction == HCCL_SEND;
    uint32_t from = sends ? comm->rank : transfer->peer;
    uint32_t to = sends ? transfer->peer : comm->rank;
    struct channel *channel = &comm->header->channels[from][to];
    unsigned written = atomic_load(&channel->written);
    unsigned read = atomic_load(&channel->read);
    unsigned possible = sends ? CHANNEL_BYTES - (written - read) : written - read;
    size_t bytes = possible < transfer->remaining ? possible : transfer->remaining;
    if (bytes == 0) {
        return;
    }
    copy_ring(channel_bytes(comm, from, to), sends ? written : read, transfer->data,
              bytes, transfer->direction);
    transfer->data += bytes;
    transfer->remaining -= bytes;
    atomic_fetch_add(sends ? &channel->written : &channel->read, (unsigned)bytes);
    ring(comm, transfer->peer);
}

struct batch {
    struct transfer *transfers;
    size_t count;
};

/* Messages between the same two ranks keep their order: a later one only moves after an
 * earlier one in the same direction has gone. */
static uint64_t transfers_pending(HcclComm comm, void *context)
{
    struct batch *batch = context;
    uint64_t unfinished[2] = {0, 0};
    for (size_t i = 0; i < batch->count; i++) {
        struct transfer *transfer = &batch->transfers[i];
        uint64_t peer = 1ULL << transfer->peer;
        if (!(unfinished[transfer->direction] & peer)) {
            advance(comm, transfer);
        }
        if (transfer->remaining > 0) {
            unfinished[transfer->direction] |= peer;
        }
    }
    return unfinished[HCCL_SEND] | unfinished[HCCL_RECV];
}

HcclResult run_transfers(HcclComm comm, struct transfer *transfers, size_t count)
{
    if (comm->error) {
        return comm->error;
    }
    for (size_t i = 0; i < count; i++) {
        if (transfers[i].peer >= comm->ranks) {
            return HCCL_E_PARA;
        }
    }
    struct batch batch = {transfers, count};
    return wait_until_done(comm, transfers_pending, &batch);
}
