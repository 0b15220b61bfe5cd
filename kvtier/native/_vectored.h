/* Part of kvtier.native._checksum: vectored reads and writes of files, without the GIL.
 *
 * Some MiB of runs are with the kernel at any time. What has come is checksummed while the next runs are on their
 * way, so that the device need not wait for the CPU.
 */

enum { ENDED = -1, LATE = -2, DEPTH = 64, FLYING = 4 << 20 };

typedef struct {
    const char *head;
    uint8_t *data;
    const uint8_t *tail; /* where the bytes from `start` on come in, if not in `data` */
    size_t start, count;
    Py_ssize_t awaited; /* runs that have not come */
    int whole;
    uint8_t digest[16];
} Block;

typedef struct {
    int fd, result; /* 0, an errno, ENDED: the file ends before, or LATE: not begun in time */
    off_t offset;
    size_t nbytes;
    Py_ssize_t count, blocks;
    struct iovec *parts;
    Block **touched;
} Run;

/* What runs and blocks take their parts from. */
typedef struct {
    struct iovec *parts;
    Py_buffer *views;
    Block **touched;
} Space;

typedef struct {
    Run *runs;
    Block *blocks;
    Py_ssize_t count, block_count, next; /* next: the first run that was not begun */
    int writes, flying;
    size_t bytes; /* of the runs that are flying */
    long most;
    double deadline;
} Flight;

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

/* Leave out what is done. */
static void advance(Run *run, size_t done) {
    run->offset += (off_t)done;
    for (; run->count && done >= run->parts->iov_len; run->count--, run->parts++)
        done -= run->parts->iov_len;
    if (done) {
        run->parts->iov_base = (char *)run->parts->iov_base + done;
        run->parts->iov_len -= done;
    }
}

static int shorter(const Run *run, long most) { return (int)(run->count < most ? run->count : most); }

/* Do what is left of a run. */
static int transfer(Run *run, int writes, long most) {
    while (run->count) {
        ssize_t done = writes ? pwritev(run->fd, run->parts, shorter(run, most), run->offset)
                              : preadv(run->fd, run->parts, shorter(run, most), run->offset);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return done < 0 ? errno : writes ? EIO : ENDED;
        advance(run, (size_t)done);
    }
    return 0;
}

/* A run is over: checksum the blocks that waited for nothing else. */
static void land(const Run *run) {
    for (Py_ssize_t at = 0; run->result == 0 && at < run->blocks; at++) {
        Block *block = run->touched[at];
        if (--block->awaited)
            continue;
        const int elsewhere = block->tail != NULL && block->start == 0;
        if (block->tail != NULL && !elsewhere)
            memcpy(block->data + block->start, block->tail, block->count - block->start);
        checksum((const uint8_t *)block->head, elsewhere ? block->tail : block->data, elsewhere ? block->data : NULL,
                 block->count, block->digest);
        block->whole = 1;
    }
}

/* Whether there is a run to begin, in time. */
static int more(Flight *flight) {
    if (flight->next < flight->count && now() >= flight->deadline)
        while (flight->next < flight->count)
            flight->runs[flight->next++].result = LATE;
    return flight->next < flight->count;
}

static void one_by_one(Flight *flight) {
    while (more(flight)) {
        Run *run = &flight->runs[flight->next++];
        run->result = transfer(run, flight->writes, flight->most);
        land(run);
    }
}

#if defined(__linux__) && defined(SYS_io_setup)
/* Several runs are given to the kernel together: the thread sleeps once for all of them, not once for each. */
static pthread_key_t queues;

static void end_queue(void *queue) { syscall(SYS_io_destroy, (aio_context_t)(uintptr_t)queue); }

static aio_context_t queue(void) {
    aio_context_t found = (aio_context_t)(uintptr_t)pthread_getspecific(queues);
    if (!found && syscall(SYS_io_setup, DEPTH, &found) == 0 && pthread_setspecific(queues, (void *)(uintptr_t)found)) {
        end_queue((void *)(uintptr_t)found);
        found = 0;
    }
    return found;
}

/* Begin as many runs as may fly. The kernel copies what describes them. */
static void launch(Flight *flight, aio_context_t to) {
    struct iocb requests[DEPTH], *list[DEPTH];
    int wanted = 0, at = 0;
    Run *first = &flight->runs[flight->next];
    for (Run *run = first; run < flight->runs + flight->count && flight->flying + wanted < DEPTH; run++) {
        if (flight->bytes && flight->bytes + run->nbytes > FLYING)
            break;
        flight->bytes += run->nbytes;
        run->result = EIO;
        requests[wanted] = (struct iocb){.aio_data = (uint64_t)(run - flight->runs),
                                         .aio_lio_opcode = flight->writes ? IOCB_CMD_PWRITEV : IOCB_CMD_PREADV,
                                         .aio_fildes = (uint32_t)run->fd,
                                         .aio_buf = (uint64_t)(uintptr_t)run->parts,
                                         .aio_nbytes = (uint64_t)shorter(run, flight->most),
                                         .aio_offset = run->offset};
        list[wanted] = &requests[wanted];
        wanted++;
    }
    flight->next += wanted;
    while (at < wanted) {
        const int taken = (int)syscall(SYS_io_submit, to, (long)(wanted - at), list + at);
        if (taken > 0) {
            at += taken;
            flight->flying += taken;
        } else { /* what is refused here says why itself, or goes the other way */
            Run *run = &first[at++];
            flight->bytes -= run->nbytes;
            run->result = transfer(run, flight->writes, flight->most);
            land(run);
        }
    }
}

/* Wait for some of the runs that fly; returns how many came. It fails only for a queue that is none, and then nothing
 * flies, or for a signal. */
static int reap(Flight *flight, aio_context_t from, struct io_event events[DEPTH]) {
    const int came = (int)syscall(SYS_io_getevents, from, 1, flight->flying, events, NULL);
    for (int at = 0; at < came; at++) {
        Run *run = &flight->runs[events[at].data];
        if (events[at].res > 0)
            advance(run, (size_t)events[at].res);
        run->result = events[at].res < 0 ? (int)-events[at].res : transfer(run, flight->writes, flight->most);
        flight->bytes -= run->nbytes;
    }
    flight->flying -= came > 0 ? came : 0;
    return came;
}

static void together(Flight *flight, aio_context_t by) {
    struct io_event events[DEPTH];
    int came = 0;
    do {
        if (more(flight))
            launch(flight, by);
        for (int at = 0; at < came; at++)
            land(&flight->runs[events[at].data]);
        came = flight->flying ? reap(flight, by, events) : 0;
    } while (came || flight->flying || flight->next < flight->count);
}

static void fly(Flight *flight) {
    const aio_context_t by = flight->count > 1 ? queue() : 0;
    if (by)
        together(flight, by);
    else
        one_by_one(flight);
}
#else
static void fly(Flight *flight) { one_by_one(flight); }
#endif
