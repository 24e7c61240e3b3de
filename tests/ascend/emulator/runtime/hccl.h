/* What the files of the emulated HCCL share.
 *
 * Numbers and layouts are those of torch_npu/include/third_party/hccl/inc/hccl/
 * hccl_types.h, restated because that header is C++ only.
 */
#ifndef NPU_EMULATOR_HCCL_H
#define NPU_EMULATOR_HCCL_H

#include <stddef.h>
#include <stdint.h>

/* --- HCCL's types ------------------------------------------------------------- */

typedef enum {
    HCCL_SUCCESS = 0,
    HCCL_E_PARA = 1,
    HCCL_E_MEMORY = 3,
    HCCL_E_NOT_SUPPORT = 5,
    HCCL_E_SYSCALL = 8,
    HCCL_E_TIMEOUT = 9,
    HCCL_E_REMOTE = 21,
} HcclResult;

typedef enum {
    HCCL_REDUCE_SUM = 0,
    HCCL_REDUCE_PROD = 1,
    HCCL_REDUCE_MAX = 2,
    HCCL_REDUCE_MIN = 3,
} HcclReduceOp;

typedef enum {
    HCCL_DATA_TYPE_INT8 = 0,
    HCCL_DATA_TYPE_INT16 = 1,
    HCCL_DATA_TYPE_INT32 = 2,
    HCCL_DATA_TYPE_FP16 = 3,
    HCCL_DATA_TYPE_FP32 = 4,
    HCCL_DATA_TYPE_INT64 = 5,
    HCCL_DATA_TYPE_UINT64 = 6,
    HCCL_DATA_TYPE_UINT8 = 7,
    HCCL_DATA_TYPE_UINT16 = 8,
    HCCL_DATA_TYPE_UINT32 = 9,
    HCCL_DATA_TYPE_FP64 = 10,
    HCCL_DATA_TYPE_BFP16 = 11,
    HCCL_DATA_TYPE_INT128 = 12,
    HCCL_DATA_TYPE_HIF8 = 14,
    HCCL_DATA_TYPE_FP8E4M3 = 15,
    HCCL_DATA_TYPE_FP8E5M2 = 16,
    HCCL_DATA_TYPE_FP8E8M0 = 17,
} HcclDataType;

enum { HCCL_ROOT_INFO_BYTES = 4108, COMM_NAME_MAX_LENGTH = 128 };

typedef struct {
    char internal[HCCL_ROOT_INFO_BYTES];
} HcclRootInfo;

typedef enum { HCCL_SEND = 0, HCCL_RECV = 1 } HcclSendRecvType;

typedef struct {
    HcclSendRecvType sendRecvType;
    void *buf;
    uint64_t count;
    HcclDataType dataType;
    uint32_t remoteRank;
} HcclSendRecvItem;

typedef void *aclrtStream;
typedef struct communicator *HcclComm;

/* --- Exchange between the ranks of a communicator (exchange.c) ---------------- */

/* Bytes that a rank shows the others at a time in a collective. */
enum { SLOT_BYTES = 512 << 10 };

/* Bytes under way from one rank to another in point-to-point transfers. */
enum { CHANNEL_BYTES = 256 << 10 };

enum { MAX_RANKS = 64 };

/* Not exported: the names are common ones. */
#pragma GCC visibility push(hidden)

uint32_t rank_of(HcclComm comm);
uint32_t ranks_of(HcclComm comm);

/* Slot of a rank in the current round. Valid until the caller's next publish. */
void *slot_of(HcclComm comm, uint32_t rank);

/* Begin a round: bytes, at most SLOT_BYTES, that the others may read from this rank's
 * slot. Returns once every rank has published its own. */
HcclResult publish(HcclComm comm, const void *data, size_t bytes);

/* A message of which a part may already have gone. */
struct transfer {
    HcclSendRecvType direction;
    uint32_t peer;
    char *data;
    size_t remaining;
};

/* Carry all of them out, each as fast as its peer takes part: none waits for another.
 */
HcclResult run_transfers(HcclComm comm, struct transfer *transfers, size_t count);

/* --- Types and reductions (reduction.c) --------------------------------------- */

/* Bytes of an element, 0 for a type that HCCL does not know. */
size_t element_bytes(HcclDataType type);

/* output[i] = op over ranks, in rank order, of element i of the rank's slot;
 * HCCL_E_NOT_SUPPORT where the type has no arithmetic. */
HcclResult reduce_slots(HcclComm comm, void *output, size_t count, HcclDataType type,
                        HcclReduceOp op);

#pragma GCC visibility pop

#endif
