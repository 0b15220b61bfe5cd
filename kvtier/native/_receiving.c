/* kvtier.native._checksum, second file: receives from a socket into many buffers and computes their XXH3-128 on the way,
 * without the GIL: each piece is hashed while the copy that brought it has left it in the cache. And one turn of a
 * conversation: what is sent, and what comes next.
 */
#include "_steps.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

/* PIECE: bytes between two looks at the hashes, a part of a processor's own cache. AWAITED: bytes that are worth waking
 * up for, where the kernel can wait for so many: a fifth more of TCP's bandwidth. */
enum { PIECE = 256 << 10, AWAITED = 128 << 10, MOST = 64, SHORTEST = 241, CLOSED = -1 };

typedef struct {
    Py_buffer view;
    PyObject *head; /* bytes; NULL: no hash is wanted */
    uint64_t acc[LANES];
    size_t lead, blocks; /* bytes of the head; blocks of head and buffer that are hashed */
    uint8_t digest[16];
} Place;

typedef struct {
    Place *places;
    Py_ssize_t count, at; /* `at`: the place that is being filled */
    size_t there;         /* bytes of it that are in place */
} Filling;

static size_t total(const Place *place) { return place->lead + (size_t)place->view.len; }

/* The first block, or all where that is less: head and bytes in one piece. */
static void assemble(const Place *place, uint8_t first[BLOCK]) {
    const size_t all = total(place), size = all < BLOCK ? all : BLOCK;
    memcpy(first, PyBytes_AS_STRING(place->head), place->lead);
    memcpy(first + place->lead, place->view.buf, size - place->lead);
}

/* Hash what can be of a place of which `there` bytes are in place. */
static void follow(Place *place, size_t there) {
    if (place->head == NULL)
        return;
    const size_t all = (total(place) - 1) / BLOCK, come = (place->lead + there) / BLOCK;
    const size_t ready = come < all ? come : all;
    const uint8_t *data = place->view.buf;
    uint8_t first[BLOCK];
    if (place->lead && !place->blocks && ready) {
        assemble(place, first);
        hash_blocks(place->acc, first, 1);
        place->blocks = 1;
    }
    if (ready > place->blocks)
        hash_blocks(place->acc, data + place->blocks * BLOCK - place->lead, ready - place->blocks);
    place->blocks = ready;
}

static void end(Place *place) {
    if (place->head == NULL)
        return;
    const uint8_t *data = place->view.buf, *rest = data + place->blocks * BLOCK - place->lead;
    uint8_t first[BLOCK];
    if (!place->blocks) {
        assemble(place, first);
        rest = first;
    }
    hash_end(place->acc, rest, data + place->view.len - STRIPE, total(place), place->digest);
}

static void take(Filling *filling, size_t count) {
    while (filling->at < filling->count) {
        Place *place = &filling->places[filling->at];
        const size_t left = (size_t)place->view.len - filling->there;
        if (count < left) {
            filling->there += count;
            follow(place, filling->there);
            return;
        }
        follow(place, (size_t)place->view.len);
        end(place);
        count -= left;
        filling->there = 0;
        filling->at++;
    }
}

/* 0: something came or is there; an errno: EAGAIN when the time is over, EINTR. */
static int waited(int fd, const struct timespec *until) {
    struct timespec now;
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    clock_gettime(CLOCK_MONOTONIC, &now);
    const double left = 1e3 * (double)(until->tv_sec - now.tv_sec) + 1e-6 * (double)(until->tv_nsec - now.tv_nsec);
    if (left <= 0)
        return EAGAIN;
    const int found = poll(&polled, 1, left < INT_MAX - 1 ? (int)left + 1 : INT_MAX);
    return found < 0 ? errno : found ? 0 : EAGAIN;
}

/* How many bytes `poll` waits for. Unix sockets ignore it, and others hold it to what their memory allows. */
static void await(int fd, int *awaited, size_t bytes) {
    const int wanted = bytes < AWAITED ? (int)bytes : AWAITED;
    if (wanted != *awaited && setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted) == 0)
        *awaited = wanted;
}

/* Fill all places; 0, CLOSED or an errno. */
static int fill(int fd, Filling *filling, const struct timespec *until, int *awaited) {
    while (filling->at < filling->count) {
        struct iovec parts[MOST];
        size_t wanted = 0, there = filling->there, used = 0;
        for (Py_ssize_t at = filling->at; at < filling->count && used < MOST && wanted < PIECE; at++, there = 0) {
            const Py_buffer *view = &filling->places[at].view;
            const size_t left = (size_t)view->len - there, room = PIECE - wanted;
            parts[used++] = (struct iovec){(char *)view->buf + there, left < room ? left : room};
            wanted += parts[used - 1].iov_len;
        }
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = used};
        const ssize_t count = recvmsg(fd, &message, MSG_DONTWAIT);
        if (count > 0)
            take(filling, (size_t)count);
        else if (count == 0 && wanted)
            return CLOSED;
        else if (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK)
            return errno;
        else {
            await(fd, awaited, wanted);
            const int trouble = waited(fd, until);
            if (trouble)
                return trouble;
        }
    }
    return 0;
}

static int describe(Place *place, PyObject *buffer, PyObject *head) {
    if (PyObject_GetBuffer(buffer, &place->view, PyBUF_WRITABLE) < 0)
        return -1;
    if (head == Py_None)
        return 0;
    const Py_ssize_t lead = PyBytes_Check(head) ? PyBytes_GET_SIZE(head) : -1;
    if ((lead != 0 && lead != STRIPE) || lead + place->view.len < SHORTEST) {
        PyErr_Format(PyExc_ValueError, "a head of %zd bytes before %zd: expected 0 or 64, and more than 240 in all", lead,
                     place->view.len);
        return -1;
    }
    place->lead = (size_t)lead;
    place->head = Py_NewRef(head);
    hash_begin(place->acc);
    return 0;
}

/* Signals are looked at where they interrupt; -1: an exception is set. */
static int run(int fd, Filling *filling, double seconds) {
    struct timespec until;
    int trouble, awaited = 1;
    clock_gettime(CLOCK_MONOTONIC, &until);
    seconds = seconds < 0 ? 0 : seconds < 1e9 ? seconds : 1e9;
    const long long nanos = until.tv_nsec + (long long)(1e9 * (seconds - (double)(long long)seconds));
    until.tv_sec += (time_t)seconds + nanos / 1000000000;
    until.tv_nsec = nanos % 1000000000;
    do {
        Py_BEGIN_ALLOW_THREADS
        trouble = fill(fd, filling, &until, &awaited);
        Py_END_ALLOW_THREADS
    } while (trouble == EINTR && PyErr_CheckSignals() == 0);
    if (awaited != 1)
        await(fd, &awaited, 1);
    if (trouble == CLOSED)
        PyErr_SetString(PyExc_ConnectionResetError, "the other side closed the connection");
    else if (trouble && trouble != EINTR) {
        errno = trouble;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    return trouble ? -1 : 0;
}

static PyObject *digests(const Filling *filling) {
    PyObject *found = PyList_New(filling->count);
    for (Py_ssize_t at = 0; found != NULL && at < filling->count; at++) {
        const Place *place = &filling->places[at];
        PyObject *digest = place->head == NULL ? Py_NewRef(Py_None)
                                               : PyBytes_FromStringAndSize((const char *)place->digest, 16);
        if (digest == NULL)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, at, digest);
    }
    return found;
}

PyObject *receive(PyObject *self, PyObject *args) {
    PyObject *buffers, *heads, *found = NULL;
    Py_ssize_t there, ready = 0, nbytes = 0;
    double seconds;
    int fd;
    (void)self;
    if (!PyArg_ParseTuple(args, "iO!O!n" "d", &fd, &PyList_Type, &buffers, &PyList_Type, &heads, &there, &seconds))
        return NULL;
    const Py_ssize_t count = PyList_GET_SIZE(buffers);
    Filling filling = {PyMem_Calloc(count ? (size_t)count : 1, sizeof(Place)), count, 0, 0};
    if (filling.places == NULL)
        return PyErr_NoMemory();
    int good = PyList_GET_SIZE(heads) == count;
    if (!good)
        PyErr_SetString(PyExc_ValueError, "buffers and heads: expected as many of each");
    for (; good && ready < count; ready += good) {
        good = describe(&filling.places[ready], PyList_GET_ITEM(buffers, ready), PyList_GET_ITEM(heads, ready)) == 0;
        nbytes += good ? filling.places[ready].view.len : 0;
    }
    if (good && !(0 <= there && there <= nbytes)) {
        PyErr_Format(PyExc_ValueError, "%zd bytes are there: expected 0 to %zd", there, nbytes);
        good = 0;
    }
    if (good) {
        take(&filling, (size_t)there);
        found = run(fd, &filling, seconds) == 0 ? digests(&filling) : NULL;
    }
    for (Py_ssize_t at = 0; at < count; at++) {
        PyBuffer_Release(&filling.places[at].view);
        Py_XDECREF(filling.places[at].head);
    }
    PyMem_Free(filling.places);
    return found;
}

/* Send what is left of a message; 0 or an errno. */
static int send_rest(int fd, Py_buffer *message, Py_ssize_t *sent) {
    while (*sent < message->len) {
        const ssize_t count = send(fd, (char *)message->buf + *sent, (size_t)(message->len - *sent), MSG_NOSIGNAL);
        if (count < 0)
            return errno;
        *sent += count;
    }
    return 0;
}

PyObject *turn(PyObject *self, PyObject *args) {
    Py_buffer message, out;
    Py_ssize_t sent = 0;
    ssize_t count = 0;
    int fd, trouble;
    (void)self;
    if (!PyArg_ParseTuple(args, "iy*w*", &fd, &message, &out))
        return NULL;
    do {
        /* One release of the GIL for both: to get it back takes as long as whoever has it meanwhile. */
        Py_BEGIN_ALLOW_THREADS
        trouble = send_rest(fd, &message, &sent);
        if (!trouble) {
            count = recv(fd, out.buf, (size_t)out.len, 0);
            trouble = count < 0 ? errno : 0;
        }
        Py_END_ALLOW_THREADS
    } while (trouble == EINTR && PyErr_CheckSignals() == 0);
    PyBuffer_Release(&message);
    PyBuffer_Release(&out);
    if (!trouble)
        return PyLong_FromSsize_t(count);
    if (trouble != EINTR) {
        errno = trouble;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    return NULL;
}
