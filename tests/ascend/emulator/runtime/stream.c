/* The emulated AscendCL: streams, events, callbacks.
 *
 * An operation has finished when its function returns, so a stream never has anything
 * pending, an event is complete, and waiting for either returns at once. An event keeps
 * the time at which it was recorded.
 */
#include "emulator.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

/* --- Streams ------------------------------------------------------------------ */

struct stream {
    int32_t id;
    uint32_t overflow_switch;
};

static atomic_int created_streams = 1;

aclError aclrtCreateStream(aclrtStream *stream)
{
    if (current_device() < 0) {
        return ACL_ERROR_RT_CONTEXT_NULL;
    }
    struct stream *created = calloc(1, sizeof *created);
    if (created == NULL) {
        return ACL_ERROR_RT_NO_STREAM_RESOURCE;
    }
    created->id = atomic_fetch_add(&created_streams, 1);
    *stream = created;
    return ACL_SUCCESS;
}

aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority,
                                     uint32_t flag)
{
    return aclrtCreateStream(stream);
}

aclError aclrtDestroyStream(aclrtStream stream)
{
    free(stream);
    return ACL_SUCCESS;
}

aclError aclrtDestroyStreamForce(aclrtStream stream)
{
    return aclrtDestroyStream(stream);
}

aclError aclrtSynchronizeStream(aclrtStream stream)
{
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout)
{
    return ACL_SUCCESS;
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status)
{
    *status = ACL_STREAM_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

/* The null stream, a context's default one, is number 0. */
aclError aclrtStreamGetId(aclrtStream stream, int32_t *streamId)
{
    *streamId = stream ? ((struct stream *)stream)->id : 0;
    return ACL_SUCCESS;
}

aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode)
{
    return ACL_SUCCESS;
}

aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag)
{
    if (stream != NULL) {
        ((struct stream *)stream)->overflow_switch = flag;
    }
    return ACL_SUCCESS;
}

aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t *flag)
{
    *flag = stream ? ((struct stream *)stream)->overflow_switch : 0;
    return ACL_SUCCESS;
}

/* --- Events ------------------------------------------------------------------- */

struct event {
    double milliseconds;
};

static double milliseconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag)
{
    if (current_device() < 0) {
        return ACL_ERROR_RT_CONTEXT_NULL;
    }
    *event = calloc(1, sizeof(struct event));
    return *event ? ACL_SUCCESS : ACL_ERROR_RT_NO_EVENT_RESOURCE;
}

aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag)
{
    return aclrtCreateEventExWithFlag(event, flag);
}

aclError aclrtCreateEvent(aclrtEvent *event)
{
    return aclrtCreateEventExWithFlag(event, 0);
}

aclError aclrtDestroyEvent(aclrtEvent event)
{
    free(event);
    return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream)
{
    ((struct event *)event)->milliseconds = milliseconds_now();
    return ACL_SUCCESS;
}

aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream)
{
    return ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event)
{
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeEvent(aclrtEvent event)
{
    return ACL_SUCCESS;
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status)
{
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status)
{
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float *ms, aclrtEvent startEvent, aclrtEvent endEvent)
{
    struct event *start = startEvent;
    struct event *end = endEvent;
    *ms = (float)(end->milliseconds - start->milliseconds);
    return ACL_SUCCESS;
}

/* --- Host functions on a stream: called at once, by the thread that launches them ---
 */

aclError aclrtLaunchCallback(aclrtCallback fn, void *userData,
                             aclrtCallbackBlockType blockType, aclrtStream stream)
{
    fn(userData);
    return ACL_SUCCESS;
}

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc fn, void *args)
{
    fn(args);
    return ACL_SUCCESS;
}

aclError aclrtSubscribeReport(uint64_t threadId, aclrtStream stream)
{
    return ACL_SUCCESS;
}

aclError aclrtUnSubscribeReport(uint64_t threadId, aclrtStream stream)
{
    return ACL_SUCCESS;
}

/* torch_npu calls this in a loop from a thread of its own. No report ever comes; it is
 * short, since that thread is asked to stop between two calls. */
aclError aclrtProcessReport(int32_t timeout)
{
    const struct timespec pause = {.tv_nsec = 10 * 1000 * 1000};
    nanosleep(&pause, NULL);
    return ACL_SUCCESS;
}
