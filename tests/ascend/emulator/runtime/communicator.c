/* The emulated HCCL: how ranks on one machine find each other, and what they are asked.
 *
 * The segment loses its name as soon as every rank has joined, so a crash leaves
 * nothing behind in /dev/shm.
 */
#define _GNU_SOURCE /* F_OFD_SETLK */

#include "communicator.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* --- Life of a rank ----------------------------------------------------------- */

/* Open-file-description locks: not shared with other handles of this process. */
static int hold_rank_lock(HcclComm comm)
{
    struct flock lock = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = comm->rank, .l_len = 1};
    return fcntl(comm->file, F_OFD_SETLK, &lock) == 0;
}

int is_gone(HcclComm comm, uint32_t rank)
{
    struct flock lock = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    return fcntl(comm->file, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

/* --- Time --------------------------------------------------------------------- */

double timeout_seconds(const char *variable, double otherwise)
{
    const char *text = getenv(variable);
    double seconds = text ? atof(text) : otherwise;
    return seconds > 0 ? seconds : 1e9;
}

double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* --- Creation ----------------------------------------------------------------- */

HcclResult HcclGetRootInfo(HcclRootInfo *rootInfo)
{
    static atomic_uint created;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    memset(rootInfo, 0, sizeof *rootInfo);
    snprintf(rootInfo->internal, COMM_NAME_MAX_LENGTH, "npu-emulator-%d-%u-%lld%09ld",
             getpid(), atomic_fetch_add(&created, 1), (long long)now.tv_sec,
             now.tv_nsec);
    return HCCL_SUCCESS;
}

/* A rank that has not come yet holds no lock: only a timeout tells that it never will.
 */
static HcclResult wait_for_everyone(HcclComm comm)
{
    double deadline = seconds_now() + timeout_seconds("HCCL_CONNECT_TIMEOUT", 120);
    while (atomic_load(&comm->header->joined) < comm->ranks) {
        if (seconds_now() > deadline) {
            fprintf(stderr,
                    "[NPU emulator] rank %u: %u of %u ranks joined %s in time\n",
                    comm->rank, atomic_load(&comm->header->joined), comm->ranks,
                    comm->name);
            return HCCL_E_TIMEOUT;
        }
        const struct timespec pause = {.tv_nsec = 1000 * 1000};
        nanosleep(&pause, NULL);
    }
    return HCCL_SUCCESS;
}

static HcclResult open_segment(HcclComm comm, const char *path)
{
    comm->file = shm_open(path, O_CREAT | O_RDWR, 0600);
    if (comm->file < 0) {
        return HCCL_E_SYSCALL;
    }
    size_t header_bytes = (sizeof(struct header) + 4095) / 4096 * 4096;
    size_t slot_bytes = (size_t)2 * comm->ranks * SLOT_BYTES;
    size_t channel_bytes = (size_t)comm->ranks * comm->ranks * CHANNEL_BYTES;
    comm->bytes = header_bytes + slot_bytes + channel_bytes;
    /* Allocated now: a full /dev/shm would otherwise kill with SIGBUS at some write. */
    if (posix_fallocate(comm->file, 0, (off_t)comm->bytes) != 0) {
        fprintf(stderr, "[NPU emulator] /dev/shm has no %zu bytes for a communicator\n",
                comm->bytes);
        return HCCL_E_MEMORY;
    }
    void *memory =
        mmap(NULL, comm->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, comm->file, 0);
    if (memory == MAP_FAILED) {
        return HCCL_E_MEMORY;
    }
    comm->header = memory;
    comm->slots = (char *)memory + header_bytes;
    comm->channel_data = comm->slots + slot_bytes;
    return hold_rank_lock(comm) ? HCCL_SUCCESS : HCCL_E_SYSCALL;
}

HcclResult HcclCommDestroy(HcclComm comm)
{
    if (comm->header != NULL) {
        munmap(comm->header, comm->bytes);
    }
    if (comm->file >= 0) {
        close(comm->file);
    }
    free(comm);
    return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t nRanks, const HcclRootInfo *rootInfo,
                                uint32_t rank, HcclComm *comm)
{
    if (nRanks == 0 || nRanks > MAX_RANKS || rank >= nRanks) {
        return HCCL_E_PARA;
    }
    HcclComm created = calloc(1, sizeof *created);
    if (created == NULL) {
        return HCCL_E_MEMORY;
    }
    created->file = -1;
    created->ranks = nRanks;
    created->rank = rank;
    memcpy(created->name, rootInfo->internal, COMM_NAME_MAX_LENGTH - 1);
    char path[COMM_NAME_MAX_LENGTH + 1];
    snprintf(path, sizeof path, "/%s", created->name);
    HcclResult result = open_segment(created, path);
    if (result == HCCL_SUCCESS) {
        if (atomic_fetch_add(&created->header->joined, 1) + 1 == nRanks) {
            shm_unlink(path);
        }
        result = wait_for_everyone(created);
    }
    if (result != HCCL_SUCCESS) {
        shm_unlink(path);
        HcclCommDestroy(created);
        return result;
    }
    *comm = created;
    return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfoConfig(uint32_t nRanks, const HcclRootInfo *rootInfo,
                                      uint32_t rank, const void *config, HcclComm *comm)
{
    return HcclCommInitRootInfo(nRanks, rootInfo, rank, comm);
}

/* --- Questions ---------------------------------------------------------------- */

HcclResult HcclGetRankSize(HcclComm comm, uint32_t *rankSize)
{
    *rankSize = comm->ranks;
    return HCCL_SUCCESS;
}

HcclResult HcclGetRankId(HcclComm comm, uint32_t *rank)
{
    *rank = comm->rank;
    return HCCL_SUCCESS;
}

HcclResult HcclGetCommName(HcclComm comm, char *commName)
{
    memcpy(commName, comm->name, COMM_NAME_MAX_LENGTH);
    return HCCL_SUCCESS;
}

HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult *asyncError)
{
    *asyncError = comm->error;
    return HCCL_SUCCESS;
}

uint32_t rank_of(HcclComm comm)
{
    return comm->rank;
}

uint32_t ranks_of(HcclComm comm)
{
    return comm->ranks;
}
