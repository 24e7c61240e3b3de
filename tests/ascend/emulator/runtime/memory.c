/* The emulated AscendCL: device memory, pinned host memory, copies.
 *
 * A device allocation is host memory with one page in front of it that says whose it
 * is. Fresh memory holds NaN, as no NPU promises zeros.
 */
#include "memory.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "emulator.h"

/* --- Accounts ----------------------------------------------------------------- */

static pthread_mutex_t account_lock = PTHREAD_MUTEX_INITIALIZER;
static size_t used_bytes[MAX_DEVICES];

size_t device_memory(void)
{
    const char *text = getenv("NPU_EMULATOR_MEMORY");
    return text ? strtoull(text, NULL, 10) : (size_t)4 << 30;
}

size_t round_up(size_t bytes, size_t multiple)
{
    return (bytes + multiple - 1) / multiple * multiple;
}

int charge(int32_t device, size_t bytes)
{
    size_t total = device_memory();
    pthread_mutex_lock(&account_lock);
    int fits = used_bytes[device] <= total && bytes <= total - used_bytes[device];
    if (fits) {
        used_bytes[device] += bytes;
    }
    pthread_mutex_unlock(&account_lock);
    return fits;
}

void refund(int32_t device, size_t bytes)
{
    pthread_mutex_lock(&account_lock);
    used_bytes[device] -= bytes;
    pthread_mutex_unlock(&account_lock);
}

aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t *free, size_t *total)
{
    int32_t device = current_device();
    if (device < 0) {
        return ACL_ERROR_RT_CONTEXT_NULL;
    }
    *total = device_memory();
    pthread_mutex_lock(&account_lock);
    *free = *total > used_bytes[device] ? *total - used_bytes[device] : 0;
    pthread_mutex_unlock(&account_lock);
    return ACL_SUCCESS;
}

/* CANN lists its own modules' use here; the emulator has none. */
aclError aclrtGetMemUsageInfo(int32_t deviceId, aclrtMemUsageInfo *memUsageInfo,
                              size_t inputNum, size_t *outputNum)
{
    *outputNum = 0;
    return ACL_SUCCESS;
}

/* --- Device memory ------------------------------------------------------------ */

/* In the page before an allocation. */
struct allocation {
    size_t bytes;
    int32_t device;
};

_Static_assert(sizeof(struct allocation) <= HOST_PAGE, "fits the page in front");

aclError aclrtMalloc(void **devPtr, size_t size, aclrtMemMallocPolicy policy)
{
    int32_t device = current_device();
    if (device < 0) {
        return ACL_ERROR_RT_CONTEXT_NULL;
    }
    if (size == 0 || size > SIZE_MAX / 2) {
        return ACL_ERROR_INVALID_PARAM;
    }
    size_t bytes = round_up(size, HOST_PAGE);
    if (!charge(device, bytes)) {
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    void *block;
    if (posix_memalign(&block, HOST_PAGE, HOST_PAGE + bytes) != 0) {
        refund(device, bytes);
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    struct allocation *allocation = block;
    allocation->bytes = bytes;
    allocation->device = device;
    *devPtr = (char *)block + HOST_PAGE;
    memset(*devPtr, UNINITIALISED, bytes);
    return ACL_SUCCESS;
}

aclError aclrtMallocAlign32(void **devPtr, size_t size, aclrtMemMallocPolicy policy)
{
    return aclrtMalloc(devPtr, size, policy);
}

aclError aclrtFree(void *devPtr)
{
    if (devPtr == NULL) {
        return ACL_ERROR_INVALID_PARAM;
    }
    struct allocation *allocation = (void *)((char *)devPtr - HOST_PAGE);
    refund(allocation->device, allocation->bytes);
    free(allocation);
    return ACL_SUCCESS;
}

/* --- Pinned host memory: any host memory -------------------------------------- */

aclError aclrtMallocHost(void **hostPtr, size_t size)
{
    size_t bytes = round_up(size ? size : 1, HOST_PAGE);
    if (posix_memalign(hostPtr, HOST_PAGE, bytes) != 0) {
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    memset(*hostPtr, UNINITIALISED, bytes);
    return ACL_SUCCESS;
}

aclError aclrtMallocHostWithCfg(void **ptr, uint64_t size, aclrtMallocConfig *cfg)
{
    return aclrtMallocHost(ptr, size);
}

aclError aclrtFreeHost(void *hostPtr)
{
    free(hostPtr);
    return ACL_SUCCESS;
}

aclError aclrtHostRegister(void *ptr, uint64_t size, aclrtHostRegisterType type,
                           void **devPtr)
{
    *devPtr = ptr;
    return ACL_SUCCESS;
}

aclError aclrtHostUnregister(void *ptr)
{
    return ACL_SUCCESS;
}

/* --- Copies and fills: done at once, whatever the stream ---------------------- */

aclError aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count,
                     aclrtMemcpyKind kind)
{
    if (count > destMax) {
        return ACL_ERROR_INVALID_PARAM;
    }
    memmove(dst, src, count);
    return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void *dst, size_t destMax, const void *src, size_t count,
                          aclrtMemcpyKind kind, aclrtStream stream)
{
    return aclrtMemcpy(dst, destMax, src, count, kind);
}

aclError aclrtMemset(void *devPtr, size_t maxCount, int32_t value, size_t count)
{
    if (count > maxCount) {
        return ACL_ERROR_INVALID_PARAM;
    }
    memset(devPtr, value, count);
    return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void *devPtr, size_t maxCount, int32_t value, size_t count,
                          aclrtStream stream)
{
    return aclrtMemset(devPtr, maxCount, value, count);
}
