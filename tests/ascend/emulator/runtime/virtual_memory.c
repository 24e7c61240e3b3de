/* The emulated AscendCL: addresses reserved apart from the memory behind them.
 *
 * torch_npu's expandable_segments reserve a large range of addresses and map physical
 * memory into it piece by piece. Here physical memory is an anonymous file; only it
 * counts against the device.
 */
#define _GNU_SOURCE /* memfd_create */

#include "emulator.h"
#include "memory.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* CANN's huge page, on which torch_npu's segments begin. */
enum { HUGE_PAGE = 2 << 20 };

/* --- Ranges of addresses, with their sizes: CANN's release and unmap get none --- */

struct range {
    void *address;
    size_t bytes;
    struct range *next;
};

static pthread_mutex_t range_lock = PTHREAD_MUTEX_INITIALIZER;
static struct range *reserved_ranges;
static struct range *mapped_ranges;

static int remember(struct range **list, void *address, size_t bytes)
{
    struct range *range = malloc(sizeof *range);
    if (range == NULL) {
        return 0;
    }
    range->address = address;
    range->bytes = bytes;
    pthread_mutex_lock(&range_lock);
    range->next = *list;
    *list = range;
    pthread_mutex_unlock(&range_lock);
    return 1;
}

/* Bytes of the range that begins at the address, now forgotten; 0 where none does. */
static size_t forget(struct range **list, void *address)
{
    size_t bytes = 0;
    pthread_mutex_lock(&range_lock);
    while (*list != NULL && (*list)->address != address) {
        list = &(*list)->next;
    }
    struct range *range = *list;
    if (range != NULL) {
        bytes = range->bytes;
        *list = range->next;
        free(range);
    }
    pthread_mutex_unlock(&range_lock);
    return bytes;
}

/* --- Addresses ---------------------------------------------------------------- */

aclError aclrtReserveMemAddress(void **virPtr, size_t size, size_t alignment,
                                void *expectPtr, uint64_t flags)
{
    /* More than asked, so that an aligned range is inside; the rest is given back. */
    size_t bytes = round_up(size, HOST_PAGE);
    char *base = mmap(NULL, bytes + HUGE_PAGE, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    char *aligned = (char *)round_up((uintptr_t)base, HUGE_PAGE);
    size_t before = (size_t)(aligned - base);
    size_t after = HUGE_PAGE - before;
    if (before > 0) {
        munmap(base, before);
    }
    if (after > 0) {
        munmap(aligned + bytes, after);
    }
    if (!remember(&reserved_ranges, aligned, bytes)) {
        munmap(aligned, bytes);
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    *virPtr = aligned;
    return ACL_SUCCESS;
}

aclError aclrtReserveMemAddressNoUCMemory(void **virPtr, size_t size, size_t alignment,
                                          void *expectPtr, uint64_t flags)
{
    return aclrtReserveMemAddress(virPtr, size, alignment, expectPtr, flags);
}

aclError aclrtReleaseMemAddress(void *virPtr)
{
    size_t bytes = forget(&reserved_ranges, virPtr);
    if (bytes == 0) {
        return ACL_ERROR_INVALID_PARAM;
    }
    munmap(virPtr, bytes);
    return ACL_SUCCESS;
}

/* --- Physical memory ---------------------------------------------------------- */

struct physical {
    int file;
    size_t bytes;
    int32_t device;
};

static int fill(int file, size_t bytes)
{
    void *view = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (view == MAP_FAILED) {
        return 0;
    }
    memset(view, UNINITIALISED, bytes);
    munmap(view, bytes);
    return 1;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size,
                             const aclrtPhysicalMemProp *prop, uint64_t flags)
{
    int32_t device = (int32_t)prop->location.id;
    if (device < 0 || device >= visible_devices()) {
        return ACL_ERROR_RT_INVALID_DEVICEID;
    }
    if (!charge(device, size)) {
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    struct physical *physical = malloc(sizeof *physical);
    int file = memfd_create("npu-emulator", MFD_CLOEXEC);
    if (physical == NULL || file < 0 || ftruncate(file, (off_t)size) != 0 ||
        !fill(file, size)) {
        if (file >= 0) {
            close(file);
        }
        free(physical);
        refund(device, size);
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    physical->file = file;
    physical->bytes = size;
    physical->device = device;
    *handle = physical;
    return ACL_SUCCESS;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle)
{
    struct physical *physical = handle;
    close(physical->file);
    refund(physical->device, physical->bytes);
    free(physical);
    return ACL_SUCCESS;
}

/* --- Memory at addresses ------------------------------------------------------ */

aclError aclrtMapMem(void *virPtr, size_t size, size_t offset, aclrtDrvMemHandle handle,
                     uint64_t flags)
{
    struct physical *physical = handle;
    if (mmap(virPtr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
             physical->file, (off_t)offset) == MAP_FAILED ||
        !remember(&mapped_ranges, virPtr, size)) {
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    return ACL_SUCCESS;
}

aclError aclrtUnmapMem(void *virPtr)
{
    size_t bytes = forget(&mapped_ranges, virPtr);
    if (bytes == 0) {
        return ACL_ERROR_INVALID_PARAM;
    }
    /* Still reserved: nobody else may get these addresses. */
    mmap(virPtr, bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    return ACL_SUCCESS;
}
