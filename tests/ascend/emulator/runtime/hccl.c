/* The emulated HCCL: collectives and point-to-point transfers.
 *
 * Each call returns when its own part is done, so the stream is not looked at. Their
 * signatures are in
 * torch_npu/include/third_party/hccl/inc/hccl/hccl.h. A collective goes in pieces of at
 * most SLOT_BYTES, one round (exchange.c) each.
 */
#include "hccl.h"

#include <stdlib.h>
#include <string.h>

/* --- Reductions --------------------------------------------------------------- */

/* Every rank publishes; the one for which receives is true reduces. */
static HcclResult reduce(HcclComm comm, const char *send, char *receive, uint64_t count,
                         HcclDataType type, HcclReduceOp op, int receives)
{
    size_t width = element_bytes(type);
    if (width == 0) {
        return HCCL_E_PARA;
    }
    uint64_t piece = SLOT_BYTES / width;
    for (uint64_t done = 0; done < count; done += piece) {
        uint64_t now = count - done < piece ? count - done : piece;
        HcclResult result = publish(comm, send + done * width, now * width);
        if (result == HCCL_SUCCESS && receives) {
            result = reduce_slots(comm, receive + done * width, now, type, op);
        }
        if (result != HCCL_SUCCESS) {
            return result;
        }
    }
    return HCCL_SUCCESS;
}

/* A mistake to make on purpose, see faults.py. */
static int is_dropped(void)
{
    const char *fault = getenv("NPU_EMULATOR_FAULT");
    return fault && strcmp(fault, "all_reduce") == 0;
}

HcclResult HcclAllReduce(void *sendBuf, void *recvBuf, uint64_t count,
                         HcclDataType dataType, HcclReduceOp op, HcclComm comm,
                         aclrtStream stream)
{
    if (is_dropped()) {
        memmove(recvBuf, sendBuf, count * element_bytes(dataType));
        return HCCL_SUCCESS;
    }
    return reduce(comm, sendBuf, recvBuf, count, dataType, op, 1);
}

HcclResult HcclReduce(void *sendBuf, void *recvBuf, uint64_t count,
                      HcclDataType dataType, HcclReduceOp op, uint32_t root,
                      HcclComm comm, aclrtStream stream)
{
    return reduce(comm, sendBuf, recvBuf, count, dataType, op, rank_of(comm) == root);
}

/* Part r of every rank's input, reduced, goes to rank r. torch may pass a part of the
 * input as the output, which no other part overlaps. */
HcclResult HcclReduceScatter(void *sendBuf, void *recvBuf, uint64_t recvCount,
                             HcclDataType dataType, HcclReduceOp op, HcclComm comm,
                             aclrtStream stream)
{
    size_t part = recvCount * element_bytes(dataType);
    for (uint32_t owner = 0; owner < ranks_of(comm); owner++) {
        HcclResult result = reduce(comm, (char *)sendBuf + owner * part, recvBuf,
                                   recvCount, dataType, op, rank_of(comm) == owner);
        if (result != HCCL_SUCCESS) {
            return result;
        }
    }
    return HCCL_SUCCESS;
}

/* --- Copies to all ------------------------------------------------------------ */

HcclResult HcclBroadcast(void *buf, uint64_t count, HcclDataType dataType,
                         uint32_t root, HcclComm comm, aclrtStream stream)
{
    if (root >= ranks_of(comm)) {
        return HCCL_E_PARA;
    }
    int is_root = rank_of(comm) == root;
    size_t bytes = count * element_bytes(dataType);
    for (size_t done = 0; done < bytes; done += SLOT_BYTES) {
        size_t now = bytes - done < SLOT_BYTES ? bytes - done : SLOT_BYTES;
        HcclResult result = publish(comm, (char *)buf + done, is_root ? now : 0);
        if (result != HCCL_SUCCESS) {
            return result;
        }
        if (!is_root) {
            memcpy((char *)buf + done, slot_of(comm, root), now);
        }
    }
    return HCCL_SUCCESS;
}

HcclResult HcclAllGather(void *sendBuf, void *recvBuf, uint64_t sendCount,
                         HcclDataType dataType, HcclComm comm, aclrtStream stream)
{
    size_t bytes = sendCount * element_bytes(dataType);
    for (size_t done = 0; done < bytes; done += SLOT_BYTES) {
        size_t now = bytes - done < SLOT_BYTES ? bytes - done : SLOT_BYTES;
        HcclResult result = publish(comm, (char *)sendBuf + done, now);
        if (result != HCCL_SUCCESS) {
            return result;
        }
        for (uint32_t rank = 0; rank < ranks_of(comm); rank++) {
            memcpy((char *)recvBuf + rank * bytes + done, slot_of(comm, rank), now);
        }
    }
    return HCCL_SUCCESS;
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream stream)
{
    return publish(comm, "", 0);
}

/* --- Point-to-point ----------------------------------------------------------- */

static struct transfer transfer_of(HcclSendRecvType direction, const void *data,
                                   uint64_t count, HcclDataType type, uint32_t peer)
{
    return (struct transfer){
        .direction = direction,
        .peer = peer,
        .data = (char *)data,
        .remaining = count * element_bytes(type),
    };
}

HcclResult HcclSend(void *sendBuf, uint64_t count, HcclDataType dataType,
                    uint32_t destRank, HcclComm comm, aclrtStream stream)
{
    struct transfer send = transfer_of(HCCL_SEND, sendBuf, count, dataType, destRank);
    return run_transfers(comm, &send, 1);
}

HcclResult HcclRecv(void *recvBuf, uint64_t count, HcclDataType dataType,
                    uint32_t srcRank, HcclComm comm, aclrtStream stream)
{
    struct transfer receive = transfer_of(HCCL_RECV, recvBuf, count, dataType, srcRank);
    return run_transfers(comm, &receive, 1);
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem *sendRecvInfo, uint32_t itemNum,
                             HcclComm comm, aclrtStream stream)
{
    struct transfer *transfers = calloc(itemNum, sizeof *transfers);
    if (transfers == NULL) {
        return HCCL_E_MEMORY;
    }
    for (uint32_t i = 0; i < itemNum; i++) {
        HcclSendRecvItem *item = &sendRecvInfo[i];
        transfers[i] = transfer_of(item->sendRecvType, item->buf, item->count,
                                   item->dataType, item->remoteRank);
    }
    HcclResult result = run_transfers(comm, transfers, itemNum);
    free(transfers);
    return result;
}

/* --- Each rank to each other: point-to-point transfers, all at once ----------- */

/* Counts and displacements are uint64_t[ranks], in elements. */
HcclResult HcclAlltoAllV(const void *sendBuf, const void *sendCounts,
                         const void *sdispls, HcclDataType sendType,
                         const void *recvBuf, const void *recvCounts,
                         const void *rdispls, HcclDataType recvType, HcclComm comm,
                         aclrtStream stream)
{
    const uint64_t *send_counts = sendCounts, *send_starts = sdispls;
    const uint64_t *receive_counts = recvCounts, *receive_starts = rdispls;
    struct transfer transfers[2 * MAX_RANKS];
    uint32_t ranks = ranks_of(comm);
    for (uint32_t rank = 0; rank < ranks; rank++) {
        const char *out =
            (const char *)sendBuf + send_starts[rank] * element_bytes(sendType);
        const char *in =
            (const char *)recvBuf + receive_starts[rank] * element_bytes(recvType);
        transfers[2 * rank] =
            transfer_of(HCCL_SEND, out, send_counts[rank], sendType, rank);
        transfers[2 * rank + 1] =
            transfer_of(HCCL_RECV, in, receive_counts[rank], recvType, rank);
    }
    return run_transfers(comm, transfers, 2 * ranks);
}

HcclResult HcclAlltoAll(const void *sendBuf, uint64_t sendCount, HcclDataType sendType,
                        const void *recvBuf, uint64_t recvCount, HcclDataType recvType,
                        HcclComm comm, aclrtStream stream)
{
    uint64_t send_counts[MAX_RANKS], send_starts[MAX_RANKS];
    uint64_t receive_counts[MAX_RANKS], receive_starts[MAX_RANKS];
    for (uint32_t rank = 0; rank < ranks_of(comm); rank++) {
        send_counts[rank] = sendCount;
        send_starts[rank] = rank * sendCount;
        receive_counts[rank] = recvCount;
        receive_starts[rank] = rank * recvCount;
    }
    return HcclAlltoAllV(sendBuf, send_counts, send_starts, sendType, recvBuf,
                         receive_counts, receive_starts, recvType, comm, stream);
}

/* Part r of the root's buffer goes to rank r, the root's own part too. */
HcclResult HcclScatter(void *sendBuf, void *recvBuf, uint64_t recvCount,
                       HcclDataType dataType, uint32_t root, HcclComm comm,
                       aclrtStream stream)
{
    struct transfer transfers[MAX_RANKS + 1];
    size_t part = recvCount * element_bytes(dataType);
    size_t count = 0;
    for (uint32_t rank = 0; rank_of(comm) == root && rank < ranks_of(comm); rank++) {
        transfers[count++] = transfer_of(HCCL_SEND, (char *)sendBuf + rank * part,
                                         recvCount, dataType, rank);
    }
    transfers[count++] = transfer_of(HCCL_RECV, recvBuf, recvCount, dataType, root);
    return run_transfers(comm, transfers, count);
}

/* --- Configuration ------------------------------------------------------------ */

/* The one option, deterministic sums, always holds here. */
HcclResult HcclSetConfig(int config, int32_t value)
{
    return HCCL_SUCCESS;
}

/* How many members of HcclCommConfigCapability there are: buffer size, determinism and
 * name, all of them accepted and without effect. */
uint32_t HcclGetCommConfigCapability(void)
{
    return 3;
}

const char *HcclGetErrorString(HcclResult code)
{
    switch (code) {
    case HCCL_SUCCESS:
        return "no error";
    case HCCL_E_PARA:
        return "parameter error";
    case HCCL_E_MEMORY:
        return "memory error";
    case HCCL_E_NOT_SUPPORT:
        return "not supported by the NPU emulator";
    case HCCL_E_SYSCALL:
        return "system call error";
    case HCCL_E_TIMEOUT:
        return "timeout: a rank did not take part";
    case HCCL_E_REMOTE:
        return "remote error: a rank ended or left";
    }
    return "unknown error";
}
