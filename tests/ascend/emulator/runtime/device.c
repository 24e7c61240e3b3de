/* The emulated AscendCL: devices and contexts.
 *
 * A device is a number and an account of memory (memory.c). A context is a pointer to
 * its device, one for each; the calling thread has at most one.
 */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* As an Ascend 910B1 has them. */
enum { CUBE_CORES = 24, VECTOR_CORES = 48, AICPU_CORES = 6 };
static const int64_t L2_CACHE_BYTES = 192LL << 20;

struct context {
    int32_t device;
};

static struct context contexts[MAX_DEVICES];
static _Thread_local struct context *thread_context;

/* --- Which devices there are -------------------------------------------------- */

/* ASCEND_RT_VISIBLE_DEVICES, a list such as "0,2": CANN takes its entries up to the
 * first that names no device, so an empty value hides all of them. */
static int32_t listed_devices(const char *list, int32_t present)
{
    int32_t count = 0;
    while (count < present) {
        char *end;
        long device = strtol(list, &end, 10);
        if (end == list || device < 0 || device >= present) {
            break;
        }
        count++;
        if (*end != ',') {
            break;
        }
        list = end + 1;
    }
    return count;
}

int32_t visible_devices(void)
{
    const char *text = getenv("NPU_EMULATOR_DEVICES");
    int32_t present = text ? atoi(text) : 1;
    if (present < 0) {
        present = 0;
    }
    if (present > MAX_DEVICES) {
        present = MAX_DEVICES;
    }
    const char *list = getenv("ASCEND_RT_VISIBLE_DEVICES");
    return list ? listed_devices(list, present) : present;
}

static int exists(int64_t device)
{
    return device >= 0 && device < visible_devices();
}

aclError aclrtGetDeviceCount(uint32_t *count)
{
    *count = (uint32_t)visible_devices();
    return ACL_SUCCESS;
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t userDevid,
                                       int32_t *const logicDevId)
{
    *logicDevId = userDevid;
    return ACL_SUCCESS;
}

/* --- The calling thread's device and context ---------------------------------- */

int32_t current_device(void)
{
    return thread_context ? thread_context->device : -1;
}

aclError aclrtSetDevice(int32_t deviceId)
{
    if (!exists(deviceId)) {
        return ACL_ERROR_RT_INVALID_DEVICEID;
    }
    contexts[deviceId].device = deviceId;
    thread_context = &contexts[deviceId];
    return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t *deviceId)
{
    if (thread_context == NULL) {
        return ACL_ERROR_RT_CONTEXT_NULL;
    }
    *deviceId = thread_context->device;
    return ACL_SUCCESS;
}

/* Memory outlives a reset here: torch_npu frees its tensors after it. */
aclError aclrtResetDevice(int32_t deviceId)
{
    return exists(deviceId) ? ACL_SUCCESS : ACL_ERROR_RT_INVALID_DEVICEID;
}

aclError aclrtResetDeviceForce(int32_t deviceId)
{
    return aclrtResetDevice(deviceId);
}

aclError aclrtGetCurrentContext(aclrtContext *context)
{
    *context = thread_context;
    return thread_context ? ACL_SUCCESS : ACL_ERROR_RT_CONTEXT_NULL;
}

aclError aclrtSetCurrentContext(aclrtContext context)
{
    if (context == NULL) {
        return ACL_ERROR_RT_CONTEXT_NULL;
    }
    thread_context = context;
    return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t deviceId, uint32_t *flags, int32_t *active)
{
    if (flags != NULL) {
        *flags = 0;
    }
    *active = current_device() == deviceId;
    return ACL_SUCCESS;
}

/* --- What a device says about itself ------------------------------------------ */

const char *aclrtGetSocName(void)
{
    if (visible_devices() == 0) {
        return NULL;
    }
    const char *name = getenv("NPU_EMULATOR_SOC");
    return name ? name : "Ascend910B1";
}

aclError aclGetDeviceCapability(uint32_t deviceId, aclDeviceInfo deviceInfo,
                                int64_t *value)
{
    switch (deviceInfo) {
    case ACL_DEVICE_INFO_AI_CORE_NUM:
        *value = CUBE_CORES;
        return ACL_SUCCESS;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM:
        *value = VECTOR_CORES;
        return ACL_SUCCESS;
    case ACL_DEVICE_INFO_L2_SIZE:
        *value = L2_CACHE_BYTES;
        return ACL_SUCCESS;
    default:
        return ACL_ERROR_INVALID_PARAM;
    }
}

aclError aclrtGetDeviceInfo(uint32_t deviceId, aclrtDevAttr attr, int64_t *value)
{
    switch (attr) {
    case ACL_DEV_ATTR_AICPU_CORE_NUM:
        *value = AICPU_CORES;
        return ACL_SUCCESS;
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case ACL_DEV_ATTR_CUBE_CORE_NUM:
        *value = CUBE_CORES;
        return ACL_SUCCESS;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM:
        *value = VECTOR_CORES;
        return ACL_SUCCESS;
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE:
        *value = (int64_t)device_memory();
        return ACL_SUCCESS;
    case ACL_DEV_ATTR_L2_CACHE_SIZE:
        *value = L2_CACHE_BYTES;
        return ACL_SUCCESS;
    case ACL_DEV_ATTR_PHY_CHIP_ID:
        *value = deviceId;
        return ACL_SUCCESS;
    case ACL_DEV_ATTR_SMP_ID:
    case ACL_DEV_ATTR_IS_VIRTUAL:
        *value = 0;
        return ACL_SUCCESS;
    default:
        return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
    }
}

aclError aclrtGetDeviceUtilizationRate(int32_t deviceId,
                                       aclrtUtilizationInfo *utilizationInfo)
{
    memset(utilizationInfo, 0, sizeof *utilizationInfo);
    return ACL_SUCCESS;
}

aclError aclrtDeviceGetBareTgid(int32_t *pid)
{
    *pid = getpid();
    return ACL_SUCCESS;
}

/* --- Peers: one process sees all of its devices' memory ----------------------- */

aclError aclrtDeviceCanAccessPeer(int32_t *canAccessPeer, int32_t deviceId,
                                  int32_t peerDeviceId)
{
    *canAccessPeer = 1;
    return ACL_SUCCESS;
}

aclError aclrtDeviceEnablePeerAccess(int32_t peerDeviceId, uint32_t flags)
{
    return ACL_SUCCESS;
}

/* --- Waiting, timeouts and overflow modes: nothing is ever pending ------------ */

aclError aclrtSynchronizeDevice(void)
{
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout)
{
    return ACL_SUCCESS;
}

aclError aclrtSetOpWaitTimeout(uint32_t timeout)
{
    return ACL_SUCCESS;
}

aclError aclrtSetOpExecuteTimeOut(uint32_t timeout)
{
    return ACL_SUCCESS;
}

aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode)
{
    return ACL_SUCCESS;
}
