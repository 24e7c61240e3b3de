/* The inside of a communicator: one POSIX shared-memory segment,
 *
 *   header | slots [2 rounds][rank][SLOT_BYTES] | channels [from][to][CHANNEL_BYTES]
 *
 * Ranks wait on one doorbell each, a futex that peers ring after every change that this
 * rank could be waiting for. A rank that is alive holds a lock on its byte of the
 * segment, which the kernel releases when the process ends, however it ends.
 */
#ifndef NPU_EMULATOR_COMMUNICATOR_H
#define NPU_EMULATOR_COMMUNICATOR_H

#include <stdatomic.h>

#include "hccl.h"

/* Counters wrap; only their difference, at most CHANNEL_BYTES, means something. */
struct channel {
    atomic_uint written;
    atomic_uint read;
};

struct header {
    atomic_uint joined;
    atomic_uint arrived;
    atomic_uint rounds;
    atomic_uint doorbells[MAX_RANKS];
    struct channel channels[MAX_RANKS][MAX_RANKS];
};

struct communicator {
    uint32_t ranks;
    uint32_t rank;
    char name[COMM_NAME_MAX_LENGTH];
    int file;
    struct header *header;
    char *slots;
    char *channel_data;
    size_t bytes;
    HcclResult error;
};

/* Not exported: the names are common ones. */
#pragma GCC visibility push(hidden)

/* Whether the rank, of a communicator that everybody joined, has ended or left. */
int is_gone(HcclComm comm, uint32_t rank);

double seconds_now(void);

/* Seconds from CANN's variable of that name, else those given; CANN's 0 is no limit. */
double timeout_seconds(const char *variable, double otherwise);

#pragma GCC visibility pop

#endif
