/* kvtier.native._checksum: what moves blocks without the GIL, a whole batch in one call: copies past the caches that
 * compute the XXH3-128 in the same pass, plain copies of many runs, and vectored reads and writes of files.
 *
 * XXH3-128, seed 0, default secret, inputs longer than 240 bytes (the xxHash specification, 0.2.0). The hash
 * reads each 1 KiB stripe block from L1; the copy of the same bytes leaves by non-temporal stores, so the target's
 * cache lines are neither fetched nor do they push out anybody's data.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "_steps.h"

#if defined(__linux__)
#include <linux/aio_abi.h>
#include <pthread.h>
#include <sys/syscall.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "xxhash's own build is used on big-endian machines"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#define STREAMS 1
#else
#define STREAMS 0
#endif

enum { LINE = 64, SECRET = 192, STREAM_FROM = 64 << 10 };
_Static_assert(BLOCK == (SECRET - STRIPE) / 8 * STRIPE, "one stripe for every 8 bytes of the secret");

static const uint8_t secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static const uint64_t P32_1 = 0x9E3779B1U, P32_2 = 0x85EBCA77U, P32_3 = 0xC2B2AE3DU;
static const uint64_t P64_1 = 0x9E3779B185EBCA87ULL, P64_2 = 0xC2B2AE3D27D4EB4FULL, P64_3 = 0x165667B19E3779F9ULL,
                      P64_4 = 0x85EBCA77C2B2AE63ULL, P64_5 = 0x27D4EB2F165667C5ULL;

static inline uint64_t word(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline void accumulate(uint64_t *restrict acc, const uint8_t *restrict data, const uint8_t *restrict key) {
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t value = word(data + 8 * lane), mixed = value ^ word(key + 8 * lane);
        acc[lane ^ 1] += value;
        acc[lane] += (mixed & 0xFFFFFFFFU) * (mixed >> 32);
    }
}

static inline void scramble(uint64_t *acc) {
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t value = acc[lane] ^ acc[lane] >> 47 ^ word(secret + SECRET - STRIPE + 8 * lane);
        acc[lane] = value * P32_1;
    }
}

static inline uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t merge(const uint64_t *acc, const uint8_t *key, uint64_t start) {
    for (int pair = 0; pair < LANES / 2; pair++)
        start += fold(acc[2 * pair] ^ word(key + 16 * pair), acc[2 * pair + 1] ^ word(key + 16 * pair + 8));
    start ^= start >> 37;
    start *= 0x165667919E3779F9ULL;
    return start ^ start >> 32;
}

#if STREAMS
/* One 1 KiB block: both accumulators stay in registers; the copy leaves by non-temporal stores right after the hash
 * has brought the bytes into L1. What the hardware fetches ahead ends with each page, so that memory would be waited
 * for at every 4 KiB: the next page is asked into L2 in time. */
__attribute__((target("avx2"))) static void add_blocks_avx2(uint64_t *acc, const uint8_t *restrict data,
                                                            uint8_t *restrict to, size_t blocks, int streamed,
                                                            size_t lag) {
    const __m256i prime = _mm256_set1_epi32((int)P32_1);
    __m256i sums[2] = {_mm256_loadu_si256((const __m256i *)acc), _mm256_loadu_si256((const __m256i *)acc + 1)};
    for (size_t block = 0; block < blocks; block++, data += BLOCK) {
        for (int stripe = 0; stripe < BLOCK / STRIPE; stripe++) {
            const __m256i *in = (const __m256i *)(data + stripe * STRIPE);
            const __m256i *key = (const __m256i *)(secret + 8 * stripe);
            _mm_prefetch((const char *)in + 512, _MM_HINT_T0);
            _mm_prefetch((const char *)in + 4096, _MM_HINT_T1);
            for (int half = 0; half < 2; half++) {
                __m256i value = _mm256_loadu_si256(in + half);
                __m256i mixed = _mm256_xor_si256(value, _mm256_loadu_si256(key + half));
                __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
                __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
                sums[half] = _mm256_add_epi64(product, _mm256_add_epi64(sums[half], swapped));
            }
        }
        for (int half = 0; half < 2; half++) {
            const __m256i key = _mm256_loadu_si256((const __m256i *)(secret + SECRET - STRIPE) + half);
            __m256i value = _mm256_xor_si256(sums[half], _mm256_srli_epi64(sums[half], 47));
            value = _mm256_xor_si256(value, key);
            __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(value, 32), prime);
            sums[half] = _mm256_add_epi64(_mm256_mul_epu32(value, prime), _mm256_slli_epi64(high, 32));
        }
        if (to == NULL)
            continue;
        if (streamed)
            for (int at = 0; at < BLOCK / 32; at++)
                _mm256_stream_si256((__m256i *)to + at, _mm256_loadu_si256((const __m256i *)(data - lag) + at));
        else
            memcpy(to, data - lag, BLOCK);
        to += BLOCK;
    }
    _mm256_storeu_si256((__m256i *)acc, sums[0]);
    _mm256_storeu_si256((__m256i *)acc + 1, sums[1]);
}
#endif

/* Adds whole 1 KiB blocks of the stream (head and data). Unless `to` is NULL as many bytes are copied there, from `lag`
 * bytes before `data` on. `streamed`: past the caches, for targets on a 32-byte boundary. */
static void add_blocks(uint64_t *acc, const uint8_t *restrict data, uint8_t *restrict to, size_t blocks, int streamed,
                       size_t lag) {
#if STREAMS
    if (__builtin_cpu_supports("avx2")) {
        add_blocks_avx2(acc, data, to, blocks, streamed, lag);
        return;
    }
#endif
    (void)streamed;
    for (size_t block = 0; block < blocks; block++, data += BLOCK) {
        for (int stripe = 0; stripe < BLOCK / STRIPE; stripe++)
            accumulate(acc, data + stripe * STRIPE, secret + 8 * stripe);
        scramble(acc);
        if (to != NULL) {
            memcpy(to, data - lag, BLOCK);
            to += BLOCK;
        }
    }
}

void hash_begin(uint64_t acc[LANES]) {
    const uint64_t start[LANES] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    memcpy(acc, start, sizeof start);
}

void hash_blocks(uint64_t acc[LANES], const uint8_t *data, size_t blocks) {
    add_blocks(acc, data, NULL, blocks, 0, 0);
}

void hash_end(uint64_t acc[LANES], const uint8_t *rest, const uint8_t last[STRIPE], size_t total, uint8_t out[16]) {
    const size_t done = (total - 1) / BLOCK * BLOCK;
    for (size_t stripe = 0; stripe < (total - 1 - done) / STRIPE; stripe++)
        accumulate(acc, rest + stripe * STRIPE, secret + 8 * stripe);
    accumulate(acc, last, secret + SECRET - STRIPE - 7);
    uint64_t low = merge(acc, secret + 11, total * P64_1);
    uint64_t high = merge(acc, secret + SECRET - STRIPE - 11, ~(total * P64_2));
    for (int at = 0; at < 8; at++) {                    /* canonical: big-endian, high half first */
        out[at] = (uint8_t)(high >> (56 - 8 * at));
        out[8 + at] = (uint8_t)(low >> (56 - 8 * at));
    }
}

static void checksum(const uint8_t head[STRIPE], const uint8_t *data, uint8_t *to, size_t count, uint8_t out[16]) {
    uint64_t acc[LANES];
    uint8_t first[BLOCK], last[STRIPE];
    const size_t total = STRIPE + count, blocks = (total - 1) / BLOCK;
    const size_t prefix = blocks ? BLOCK - STRIPE : count;
    const int streamed = STREAMS && to != NULL && count >= STREAM_FROM;
    /* Streams begin where a line of the target does: the copy trails the hash by these bytes. */
    const size_t lag = streamed ? (uintptr_t)(to + prefix) % LINE : 0;

    hash_begin(acc);
    memcpy(first, head, STRIPE);
    memcpy(first + STRIPE, data, prefix);
    if (to != NULL)
        memcpy(to, data, prefix);
    if (blocks) {
        add_blocks(acc, first, NULL, 1, 0, 0);
        add_blocks(acc, data + prefix, to == NULL ? NULL : to + prefix - lag, blocks - 1, streamed, lag);
    }
    const size_t done = blocks * BLOCK;                 /* bytes of head and data */
    const uint8_t *rest = blocks ? data + done - STRIPE : first;
    if (blocks && to != NULL)
        memcpy(to + done - STRIPE - lag, rest - lag, total - done + lag);
    memcpy(last, blocks || count >= STRIPE ? data + count - STRIPE : first + total - STRIPE, STRIPE);
    hash_end(acc, rest, last, total, out);
#if STREAMS
    if (streamed)
        _mm_sfence();
#endif
}

typedef struct {
    Py_buffer source, target;
    PyObject *head;
    size_t count;
    uint8_t digest[16];
} Job;

static int describe(Job *job, PyObject *head, PyObject *source, PyObject *target, PyObject *size) {
    Py_ssize_t count = PyLong_AsSsize_t(size);
    if (count == -1 && PyErr_Occurred())
        return -1;
    if (PyObject_GetBuffer(source, &job->source, PyBUF_SIMPLE) < 0)
        return -1;
    if (target != Py_None && PyObject_GetBuffer(target, &job->target, PyBUF_WRITABLE) < 0)
        return -1;
    Py_ssize_t head_bytes = PyBytes_Check(head) ? PyBytes_GET_SIZE(head) : -1;
    if (head_bytes != STRIPE || STRIPE + count <= 240 || job->source.len < count ||
        (job->target.obj != NULL && job->target.len < count)) {
        PyErr_Format(PyExc_ValueError,
                     "head of %zd, source of %zd, target of %zd bytes for %zd: expected bytes of 64, more than 176, "
                     "and a source and a target at least as long",
                     head_bytes, job->source.len, job->target.obj != NULL ? job->target.len : -1, count);
        return -1;
    }
    job->head = Py_NewRef(head);
    job->count = (size_t)count;
    return 0;
}

static PyObject *run(Job *jobs, Py_ssize_t count) {
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < count; at++)
        checksum((const uint8_t *)PyBytes_AS_STRING(jobs[at].head), jobs[at].source.buf, jobs[at].target.buf,
                 jobs[at].count, jobs[at].digest);
    Py_END_ALLOW_THREADS
    PyObject *digests = PyList_New(count);
    for (Py_ssize_t at = 0; digests != NULL && at < count; at++) {
        PyObject *digest = PyBytes_FromStringAndSize((const char *)jobs[at].digest, sizeof jobs[at].digest);
        if (digest == NULL)
            Py_CLEAR(digests);
        else
            PyList_SET_ITEM(digests, at, digest);
    }
    return digests;
}

static PyObject *copy_checksums(PyObject *self, PyObject *args) {
    PyObject *columns[4], *digests = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O!O!O!", &PyList_Type, &columns[0], &PyList_Type, &columns[1], &PyList_Type,
                          &columns[2], &PyList_Type, &columns[3]))
        return NULL;
    const Py_ssize_t count = PyList_GET_SIZE(columns[0]);
    for (int column = 1; column < 4; column++)
        if (PyList_GET_SIZE(columns[column]) != count) {
            PyErr_SetString(PyExc_ValueError, "heads, sources, targets and sizes: expected as many of each");
            return NULL;
        }
    Job *jobs = PyMem_Calloc(count ? (size_t)count : 1, sizeof *jobs);
    if (jobs == NULL)
        return PyErr_NoMemory();
    Py_ssize_t ready = 0;
    while (ready < count &&
           describe(&jobs[ready], PyList_GET_ITEM(columns[0], ready), PyList_GET_ITEM(columns[1], ready),
                    PyList_GET_ITEM(columns[2], ready), PyList_GET_ITEM(columns[3], ready)) == 0)
        ready++;
    if (ready == count)
        digests = run(jobs, count);
    for (Py_ssize_t at = 0; at < count; at++) {
        PyBuffer_Release(&jobs[at].source);
        PyBuffer_Release(&jobs[at].target);
        Py_XDECREF(jobs[at].head);
    }
    PyMem_Free(jobs);
    return digests;
}

/* ---- vectored reads and writes of files */

#include "_vectored.h"

static int take_run(PyObject *item, const Flight *flight, Run *run, Space *left) {
    long long offset;
    PyObject *buffers, *touched = NULL;
    if (!PyArg_ParseTuple(item, "iLO!|O!", &run->fd, &offset, &PyList_Type, &buffers, &PyList_Type, &touched))
        return -1;
    run->offset = (off_t)offset;
    run->parts = left->parts;
    run->touched = left->touched;
    for (; run->count < PyList_GET_SIZE(buffers); run->count++) {
        const int access = flight->writes ? PyBUF_SIMPLE : PyBUF_WRITABLE;
        if (PyObject_GetBuffer(PyList_GET_ITEM(buffers, run->count), left->views, access) < 0)
            return -1;
        *left->parts++ = (struct iovec){left->views->buf, (size_t)left->views->len};
        run->nbytes += (size_t)left->views++->len;
    }
    for (; touched != NULL && run->blocks < PyList_GET_SIZE(touched); run->blocks++) {
        const Py_ssize_t number = PyLong_AsSsize_t(PyList_GET_ITEM(touched, run->blocks));
        if (number < 0 || number >= flight->block_count) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_IndexError, "block %zd of %zd", number, flight->block_count);
            return -1;
        }
        flight->blocks[number].awaited++;
        *left->touched++ = &flight->blocks[number];
    }
    return 0;
}

static int take_block(PyObject *item, Block *block, Space *left) {
    Py_ssize_t head_bytes, count, start;
    PyObject *data, *tail;
    if (!PyArg_ParseTuple(item, "y#OnnO", &block->head, &head_bytes, &data, &count, &start, &tail))
        return -1;
    if (PyObject_GetBuffer(data, left->views, PyBUF_WRITABLE) < 0)
        return -1;
    const Py_buffer *whole = left->views++, *end = NULL;
    if (tail != Py_None) {
        if (PyObject_GetBuffer(tail, left->views, PyBUF_SIMPLE) < 0)
            return -1;
        end = left->views++;
    }
    if (head_bytes != STRIPE || STRIPE + count <= 240 || whole->len < count ||
        (end != NULL && (start < 0 || start > count || end->len < count - start))) {
        PyErr_Format(PyExc_ValueError,
                     "head of %zd, memory of %zd, from %zd on %zd bytes for %zd: expected 64, more than 176, and "
                     "memory at least as long",
                     head_bytes, whole->len, start, end != NULL ? end->len : -1, count);
        return -1;
    }
    block->data = whole->buf;
    block->tail = end != NULL ? end->buf : NULL;
    block->start = (size_t)start;
    block->count = (size_t)count;
    return 0;
}

static PyObject *results_of(const Flight *flight) {
    PyObject *results = PyList_New(flight->count), *digests = PyList_New(flight->block_count);
    int good = results != NULL && digests != NULL;
    for (Py_ssize_t at = 0; good && at < flight->count; at++) {
        PyObject *result = PyLong_FromLong(flight->runs[at].result);
        good = result != NULL;
        PyList_SET_ITEM(results, at, result);
    }
    for (Py_ssize_t at = 0; good && at < flight->block_count; at++) {
        const Block *block = &flight->blocks[at];
        PyObject *digest = PyBytes_FromStringAndSize((const char *)block->digest, block->whole ? 16 : 0);
        good = digest != NULL;
        PyList_SET_ITEM(digests, at, digest);
    }
    if (good)
        return Py_BuildValue("(NN)", results, digests);
    Py_XDECREF(results);
    Py_XDECREF(digests);
    return NULL;
}

/* How many buffers and touched blocks the runs name; -1 with an exception for what is no run. */
static Py_ssize_t listed(PyObject *runs) {
    Py_ssize_t total = 0;
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(runs); at++) {
        PyObject *run = PyTuple_GET_ITEM(runs, at);
        if (!PyTuple_Check(run) || PyTuple_GET_SIZE(run) < 3) {
            PyErr_SetString(PyExc_TypeError, "a run is a tuple of descriptor, offset, list of buffers, and of blocks");
            return -1;
        }
        for (Py_ssize_t part = 2; part < PyTuple_GET_SIZE(run); part++)
            total += PyList_Check(PyTuple_GET_ITEM(run, part)) ? PyList_GET_SIZE(PyTuple_GET_ITEM(run, part)) : 0;
    }
    return total;
}

static PyObject *move_checked(PyObject *self, PyObject *args) {
    PyObject *runs, *blocks, *results = NULL;
    double seconds;
    Flight flight = {.most = sysconf(_SC_IOV_MAX)};
    (void)self;
    if (!PyArg_ParseTuple(args, "O!pO!d", &PyTuple_Type, &runs, &flight.writes, &PyTuple_Type, &blocks, &seconds))
        return NULL;
    const Py_ssize_t total = listed(runs);
    if (total < 0)
        return NULL;
    flight.deadline = now() + seconds;
    flight.count = PyTuple_GET_SIZE(runs);
    flight.block_count = PyTuple_GET_SIZE(blocks);
    flight.runs = PyMem_Calloc((size_t)flight.count + 1, sizeof *flight.runs);
    flight.blocks = PyMem_Calloc((size_t)flight.block_count + 1, sizeof *flight.blocks);
    const Space all = {PyMem_Calloc((size_t)total + 1, sizeof *all.parts),
                       PyMem_Calloc((size_t)(total + 2 * flight.block_count) + 1, sizeof *all.views),
                       PyMem_Calloc((size_t)total + 1, sizeof *all.touched)};
    Space left = all;
    int good = flight.runs && flight.blocks && all.parts && all.views && all.touched;
    if (!good)
        PyErr_NoMemory();
    for (Py_ssize_t at = 0; good && at < flight.block_count; at++)
        good = take_block(PyTuple_GET_ITEM(blocks, at), &flight.blocks[at], &left) == 0;
    for (Py_ssize_t at = 0; good && at < flight.count; at++)
        good = take_run(PyTuple_GET_ITEM(runs, at), &flight, &flight.runs[at], &left) == 0;
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        fly(&flight);
        Py_END_ALLOW_THREADS
        results = results_of(&flight);
    }
    for (Py_buffer *view = all.views; view != left.views; view++)
        PyBuffer_Release(view);
    PyMem_Free(all.touched);
    PyMem_Free(all.views);
    PyMem_Free(all.parts);
    PyMem_Free(flight.blocks);
    PyMem_Free(flight.runs);
    return results;
}

static PyObject *addresses(PyObject *self, PyObject *buffers) {
    (void)self;
    if (!PyList_Check(buffers)) {
        PyErr_SetString(PyExc_TypeError, "expected a list of buffers");
        return NULL;
    }
    PyObject *found = PyList_New(PyList_GET_SIZE(buffers));
    for (Py_ssize_t at = 0; found != NULL && at < PyList_GET_SIZE(found); at++) {
        Py_buffer view;
        PyObject *address = NULL;
        if (PyObject_GetBuffer(PyList_GET_ITEM(buffers, at), &view, PyBUF_SIMPLE) == 0) {
            address = PyLong_FromVoidPtr(view.buf);
            PyBuffer_Release(&view);
        }
        if (address == NULL)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, at, address);
    }
    return found;
}

enum { MOST_THREADS = 16 };

typedef struct {
    const int64_t *targets, *sources, *sizes;
    Py_ssize_t first, last;
} Share;

static void *copy_share(void *given) {
    const Share *share = given;
    for (Py_ssize_t at = share->first; at < share->last; at++)
        memcpy((void *)(intptr_t)share->targets[at], (const void *)(intptr_t)share->sources[at],
               (size_t)share->sizes[at]);
    return NULL;
}

/* As many bytes for each thread; what finds no thread is done by the caller's. */
static void copy_shared(Share whole, int threads) {
    Share shares[MOST_THREADS];
    int64_t total = 0, sum = 0;
    int used = 0;
    for (Py_ssize_t at = 0; at < whole.last; at++)
        total += whole.sizes[at];
    shares[0] = whole;
    for (Py_ssize_t at = 0; at < whole.last && used < threads - 1; at++) {
        sum += whole.sizes[at];
        if (sum >= total / threads * (used + 1)) {
            shares[used].last = at + 1;
            shares[++used] = whole;
            shares[used].first = at + 1;
        }
    }
#if defined(__linux__)
    pthread_t started[MOST_THREADS];
    int running[MOST_THREADS] = {0};
    for (int at = 1; at <= used; at++)
        running[at] = pthread_create(&started[at], NULL, copy_share, &shares[at]) == 0;
    for (int at = 0; at <= used; at++)
        if (!running[at])
            copy_share(&shares[at]);
    for (int at = 1; at <= used; at++)
        if (running[at])
            pthread_join(started[at], NULL);
#else
    copy_share(&whole);
#endif
}

static PyObject *copy_runs(PyObject *self, PyObject *args) {
    Py_buffer columns[3];
    int threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*y*i", &columns[0], &columns[1], &columns[2], &threads))
        return NULL;
    const int fits = columns[0].len == columns[1].len && columns[0].len == columns[2].len && columns[0].len % 8 == 0;
    if (fits) {
        const Share whole = {columns[0].buf, columns[1].buf, columns[2].buf, 0, columns[0].len / 8};
        threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
        Py_BEGIN_ALLOW_THREADS
        copy_shared(whole, threads);
        Py_END_ALLOW_THREADS
    }
    for (int at = 0; at < 3; at++)
        PyBuffer_Release(&columns[at]);
    if (fits)
        Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "expected three int64 columns of one length");
    return NULL;
}

static PyMethodDef methods[] = {
    {"copy_runs", copy_runs, METH_VARARGS,
     "copy_runs(targets, sources, sizes, threads): memcpy between addresses, int64 columns, by up to so many threads. "
     "Without the GIL for the whole batch."},
    {"copy_checksums", copy_checksums, METH_VARARGS,
     "copy_checksums(heads, sources, targets or Nones, sizes), lists: copy the leading bytes of each source and return "
     "xxh3_128(head + them) of each, 16 bytes. Without the GIL for the whole batch."},
    {"move_checked", move_checked, METH_VARARGS,
     "move_checked(runs, writes, blocks, seconds): for each run, a tuple of file descriptor, offset, list of buffers and, "
     "if any, list of the blocks that lie in it, preadv or pwritev until all is done, or none of it where the seconds "
     "were over before; 0, an errno, -1 (the file ends before) or -2 (late) each. And for each block, a tuple of head, "
     "memory, size, and from where on what memory (or None) has it, xxh3_128(head + bytes), or b'' if a run failed. "
     "Without the GIL for the whole batch."},
    {"receive", receive, METH_VARARGS,
     "receive(fd, buffers, heads or Nones, there, seconds), lists: fill the buffers from a socket, of which the leading "
     "`there` bytes are in place; xxh3_128(head + buffer) of each, or None. Without the GIL."},
    {"turn", turn, METH_VARARGS,
     "turn(fd, message, out): send all of a message, then receive what comes next, up to as much as fits into `out`; how "
     "many bytes that was. Without the GIL."},
    {"addresses", addresses, METH_O, "addresses(buffers): where each of a list of buffers begins."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_checksum", NULL, -1, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__checksum(void) {
#if defined(__linux__) && defined(SYS_io_setup)
    if (pthread_key_create(&queues, end_queue))
        return PyErr_NoMemory();
#endif
    return PyModule_Create(&module);
}
