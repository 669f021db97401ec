/* `lanes.py` in C: lanes, rows, what puts texts into lanes and what writes them. */

#include "native.h"

#include <string.h>
#include <sys/socket.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 /* Python ignores SIGPIPE. */
#endif

#define NEVER (-1)
#define CHUNK_END_LEN 2
#define CHUNK_HEAD_LEN (2 * sizeof(size_t) + 2) /* A length in hexadecimal digits, and the end of the line. */

/* ---- types ------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    int fd;
} SocketHandle;

static int handle_init(PyObject *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {"fd", NULL};
    return PyArg_ParseTupleAndKeywords(args, keywords, "i", names, &((SocketHandle *)self)->fd) ? 0 : -1;
}

static PyObject *handle_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *self = type->tp_alloc(type, 0);
    if (self) ((SocketHandle *)self)->fd = -1;
    return self;
}

static PyMemberDef handle_members[] = {{"fd", T_INT, offsetof(SocketHandle, fd)}, {NULL}};

PyTypeObject SocketHandleType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "asyncserve.token_path.native.SocketHandle",
    .tp_basicsize = sizeof(SocketHandle),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = handle_new,
    .tp_init = handle_init,
    .tp_members = handle_members,
};

typedef struct {
    PyObject_HEAD
    PyObject *texts, *outbox, *socket, *before, *between, *after, *held;
    Py_ssize_t flush_len, num_quiet_ticks;
    char is_chunked, is_resting;
} TextLane;

static int lane_traverse(TextLane *self, visitproc visit, void *arg) {
    Py_VISIT(self->texts);
    Py_VISIT(self->outbox);
    Py_VISIT(self->socket);
    Py_VISIT(self->before);
    Py_VISIT(self->between);
    Py_VISIT(self->after);
    Py_VISIT(self->held);
    return 0;
}

static int lane_clear(TextLane *self) {
    Py_CLEAR(self->texts);
    Py_CLEAR(self->outbox);
    Py_CLEAR(self->socket);
    Py_CLEAR(self->before);
    Py_CLEAR(self->between);
    Py_CLEAR(self->after);
    Py_CLEAR(self->held);
    return 0;
}

static void lane_dealloc(TextLane *self) {
    PyObject_GC_UnTrack(self);
    lane_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int lane_init(TextLane *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "", names)) return -1;
    Py_XSETREF(self->texts, PyList_New(0));
    Py_XSETREF(self->socket, Py_NewRef(Py_None));
    Py_XSETREF(self->before, PyBytes_FromStringAndSize(NULL, 0));
    Py_XSETREF(self->between, PyBytes_FromStringAndSize(NULL, 0));
    Py_XSETREF(self->after, PyBytes_FromStringAndSize(NULL, 0));
    Py_XSETREF(self->held, PyTuple_New(0));
    self->flush_len = NEVER;
    self->num_quiet_ticks = 0;
    self->is_chunked = self->is_resting = 0;
    return self->texts && self->before && self->between && self->after && self->held ? 0 : -1;
}

static PyMemberDef lane_members[] = {
    {"texts", T_OBJECT_EX, offsetof(TextLane, texts)},
    {"flush_len", T_PYSSIZET, offsetof(TextLane, flush_len)},
    {"outbox", T_OBJECT_EX, offsetof(TextLane, outbox)},
    {"socket", T_OBJECT_EX, offsetof(TextLane, socket)},
    {"before", T_OBJECT_EX, offsetof(TextLane, before)},
    {"between", T_OBJECT_EX, offsetof(TextLane, between)},
    {"after", T_OBJECT_EX, offsetof(TextLane, after)},
    {"held", T_OBJECT_EX, offsetof(TextLane, held)},
    {"is_chunked", T_BOOL, offsetof(TextLane, is_chunked)},
    {"is_resting", T_BOOL, offsetof(TextLane, is_resting)},
    {"num_quiet_ticks", T_PYSSIZET, offsetof(TextLane, num_quiet_ticks)},
    {NULL},
};

PyTypeObject TextLaneType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "asyncserve.token_path.native.TextLane",
    .tp_basicsize = sizeof(TextLane),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)lane_init,
    .tp_dealloc = (destructor)lane_dealloc,
    .tp_traverse = (traverseproc)lane_traverse,
    .tp_clear = (inquiry)lane_clear,
    .tp_members = lane_members,
};

typedef struct {
    PyObject_HEAD
    PyObject *encoded, *lane, *last_token_s;
    Py_ssize_t num_passed;
} TextRow;

static int row_traverse(TextRow *self, visitproc visit, void *arg) {
    Py_VISIT(self->encoded);
    Py_VISIT(self->lane);
    Py_VISIT(self->last_token_s);
    return 0;
}

static int row_clear(TextRow *self) {
    Py_CLEAR(self->encoded);
    Py_CLEAR(self->lane);
    Py_CLEAR(self->last_token_s);
    return 0;
}

static void row_dealloc(TextRow *self) {
    PyObject_GC_UnTrack(self);
    row_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int row_init(TextRow *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "", names)) return -1;
    Py_XSETREF(self->encoded, Py_NewRef(Py_None));
    Py_XSETREF(self->lane, Py_NewRef(Py_None));
    Py_XSETREF(self->last_token_s, Py_NewRef(Py_None));
    self->num_passed = 0;
    return 0;
}

static PyMemberDef row_members[] = {
    {"encoded", T_OBJECT_EX, offsetof(TextRow, encoded)},
    {"lane", T_OBJECT_EX, offsetof(TextRow, lane)},
    {"last_token_s", T_OBJECT_EX, offsetof(TextRow, last_token_s)},
    {"num_passed", T_PYSSIZET, offsetof(TextRow, num_passed)},
    {NULL},
};

PyTypeObject TextRowType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "asyncserve.token_path.native.TextRow",
    .tp_basicsize = sizeof(TextRow),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)row_init,
    .tp_dealloc = (destructor)row_dealloc,
    .tp_traverse = (traverseproc)row_traverse,
    .tp_clear = (inquiry)row_clear,
    .tp_members = row_members,
};

/* ---- deliver ----------------------------------------------------------------------------------------- */

static PyObject *sequence_id_name;

/* Put a text into its lane. Returns 1 if that made the lane due, -1 with an exception. */
static int add_text(TextLane *lane, PyObject *text, PyObject *outboxes) {
    if (!lane->texts || !PyList_Check(lane->texts)) {
        PyErr_SetString(PyExc_TypeError, "the texts of a lane are a list");
        return -1;
    }
    if (PyList_Append(lane->texts, text)) return -1;
    if (PyList_GET_SIZE(lane->texts) != lane->flush_len) return 0;
    PyObject *outbox = lane->outbox;
    if (!outbox || !PyList_Check(outbox)) {
        PyErr_SetString(PyExc_TypeError, "the outbox of a lane is a list");
        return -1;
    }
    Py_ssize_t i = 0;
    while (i < PyList_GET_SIZE(outboxes) && PyList_GET_ITEM(outboxes, i) != outbox) i++;
    if (i == PyList_GET_SIZE(outboxes) && PyList_Append(outboxes, outbox)) return -1;
    return PyList_Append(outbox, (PyObject *)lane) ? -1 : 1;
}

/* Note when a row's token came. Returns 1 if the one before came with the last step, -1 with an exception. */
static int note_token(TextRow *row, PyObject *now_s, PyObject *last_s, PyObject *gaps_s) {
    PyObject *before_s = row->last_token_s;
    int is_alike = before_s == last_s;
    if (!is_alike && before_s && before_s != Py_None) {
        PyObject *gap_s = PyNumber_Subtract(now_s, before_s);
        if (!gap_s) return -1;
        int failed = PyList_Append(gaps_s, gap_s);
        Py_DECREF(gap_s);
        if (failed) return -1;
    }
    Py_XSETREF(row->last_token_s, Py_NewRef(now_s));
    return is_alike;
}

/* Return the text a row's lane takes for a token, borrowed; NULL if there is none, or with an exception. */
static PyObject *text_of(TextRow *row, PyObject *token_id) {
    PyObject *encoded = row->encoded, *lane = row->lane;
    if (!encoded || encoded == Py_None || !lane || lane == Py_None) return NULL;
    if (!PyDict_Check(encoded) || !PyObject_TypeCheck(lane, &TextLaneType)) {
        PyErr_SetString(PyExc_TypeError, "a row's texts are a dict and its lane is a TextLane");
        return NULL;
    }
    PyObject *text = PyDict_GetItemWithError(encoded, token_id);
    return text == Py_None ? NULL : text;
}

static PyObject *deliver(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 8 || !PyDict_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "deliver takes a dict of rows and seven more");
        return NULL;
    }
    PyObject *rows = args[0], *now_s = args[6], *last_s = args[7], *result = NULL;
    Py_ssize_t position = PyLong_AsSsize_t(args[3]), end = PyLong_AsSsize_t(args[4]);
    Py_ssize_t most = PyLong_AsSsize_t(args[5]), num_alike = 0, num_due = 0;
    if (PyErr_Occurred()) return NULL;
    PyObject *states = PySequence_Fast(args[1], "the states are a sequence");
    PyObject *token_ids = states ? PySequence_Fast(args[2], "the tokens are a sequence") : NULL;
    PyObject *gaps_s = PyList_New(0), *others = PyList_New(0), *outboxes = PyList_New(0);
    if (!token_ids || !gaps_s || !others || !outboxes) goto done;
    if (position < 0 || end > PySequence_Fast_GET_SIZE(states) || end > PySequence_Fast_GET_SIZE(token_ids)) {
        PyErr_SetString(PyExc_IndexError, "the slice exceeds the tokens");
        goto done;
    }
    while (position < end && num_due < most) {
        PyObject *token_id = PySequence_Fast_GET_ITEM(token_ids, position);
        PyObject *id = PyObject_GetAttr(PySequence_Fast_GET_ITEM(states, position), sequence_id_name);
        if (!id) goto done;
        TextRow *row = (TextRow *)PyDict_GetItemWithError(rows, id);
        Py_DECREF(id);
        position++;
        if (!row) {
            if (PyErr_Occurred()) goto done;
            continue;
        }
        if (!PyObject_TypeCheck(row, &TextRowType)) {
            PyErr_SetString(PyExc_TypeError, "the rows are of TextRow");
            goto done;
        }
        int is_alike = note_token(row, now_s, last_s, gaps_s);
        if (is_alike < 0) goto done;
        num_alike += is_alike;
        PyObject *text = text_of(row, token_id);
        if (text) {
            int is_due = add_text((TextLane *)row->lane, text, outboxes);
            if (is_due < 0) goto done;
            row->num_passed++;
            num_due += is_due;
        } else if (PyErr_Occurred()) {
            goto done;
        } else if (append_pair(others, (PyObject *)row, token_id)) {
            goto done;
        }
    }
    result = Py_BuildValue("nnOOO", position, num_alike, gaps_s, others, outboxes);
done:
    Py_XDECREF(states);
    Py_XDECREF(token_ids);
    Py_XDECREF(gaps_s);
    Py_XDECREF(others);
    Py_XDECREF(outboxes);
    return result;
}

/* ---- write ------------------------------------------------------------------------------------------- */

typedef struct {
    TextLane *lane;
    int fd;
    Py_ssize_t num_texts, begin, len, num_sent;
} Write;

/* Return how many bytes a lane's write has at most, -1 if it cannot be made here. */
static Py_ssize_t room_for(TextLane *lane) {
    if (!lane->socket || (lane->socket != Py_None && Py_TYPE(lane->socket) != &SocketHandleType) ||
        !lane->held || !PyTuple_Check(lane->held) || PyTuple_GET_SIZE(lane->held) ||
        !lane->texts || !PyList_Check(lane->texts) || !lane->before || !PyBytes_Check(lane->before) ||
        !lane->between || !PyBytes_Check(lane->between) || !lane->after || !PyBytes_Check(lane->after))
        return -1;
    Py_ssize_t num_texts = PyList_GET_SIZE(lane->texts);
    if (num_texts == 0) return -1;
    Py_ssize_t len = (Py_ssize_t)CHUNK_HEAD_LEN + (num_texts - 1) * PyBytes_GET_SIZE(lane->between) +
                     PyBytes_GET_SIZE(lane->before) + PyBytes_GET_SIZE(lane->after);
    for (Py_ssize_t i = 0; i < num_texts; i++) {
        PyObject *text = PyList_GET_ITEM(lane->texts, i);
        if (!PyBytes_Check(text)) return -1;
        len += PyBytes_GET_SIZE(text);
    }
    return len;
}

static char *put(char *at, PyObject *bytes) {
    memcpy(at, PyBytes_AS_STRING(bytes), PyBytes_GET_SIZE(bytes));
    return at + PyBytes_GET_SIZE(bytes);
}

static char *put_chunk_head(char *at, size_t len) {
    int shift = 0;
    while (shift + 4 < 8 * (int)sizeof len && len >> (shift + 4)) shift += 4;
    for (; shift >= 0; shift -= 4) *at++ = "0123456789abcdef"[len >> shift & 15];
    *at++ = '\r';
    *at++ = '\n';
    return at;
}

/* Put a lane's write at `at`, where there is room for it; return where it ends. */
static char *put_write(char *at, TextLane *lane) {
    Py_ssize_t num_texts = PyList_GET_SIZE(lane->texts);
    if (lane->is_chunked) {
        Py_ssize_t len = PyBytes_GET_SIZE(lane->before) + PyBytes_GET_SIZE(lane->after) - CHUNK_END_LEN +
                         (num_texts - 1) * PyBytes_GET_SIZE(lane->between);
        for (Py_ssize_t i = 0; i < num_texts; i++) len += PyBytes_GET_SIZE(PyList_GET_ITEM(lane->texts, i));
        at = put_chunk_head(at, (size_t)len);
    }
    at = put(at, lane->before);
    for (Py_ssize_t i = 0; i < num_texts; i++) {
        if (i) at = put(at, lane->between);
        at = put(at, PyList_GET_ITEM(lane->texts, i));
    }
    return put(at, lane->after);
}

static PyObject *write_lanes(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 2 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "write takes a list of lanes and a number");
        return NULL;
    }
    PyObject *lanes = args[0], *result = NULL;
    Py_ssize_t num_lanes = PyList_GET_SIZE(lanes), flush_len = PyLong_AsSsize_t(args[1]);
    if (flush_len == -1 && PyErr_Occurred()) return NULL;
    Py_ssize_t room = 0, len = 0, num_texts = 0;
    char *data = NULL;
    Write *writes = PyMem_Malloc((num_lanes + 1) * sizeof *writes);
    PyObject *unwritten = PyList_New(0);
    if (!writes || !unwritten) goto done;
    /* What may fail comes first, as far as it can: texts that were taken off a lane must be sent. */
    for (Py_ssize_t i = 0; i < num_lanes; i++) {
        TextLane *lane = (TextLane *)PyList_GET_ITEM(lanes, i);
        if (!PyObject_TypeCheck(lane, &TextLaneType)) {
            PyErr_SetString(PyExc_TypeError, "the lanes are of TextLane");
            goto done;
        }
        Py_ssize_t lane_room = room_for(lane);
        writes[i] = (Write){.lane = lane, .fd = -1};
        if (lane_room < 0) continue;
        writes[i].num_texts = PyList_GET_SIZE(lane->texts);
        room += lane_room;
    }
    data = PyMem_Malloc(room + 1);
    if (!data) goto done;
    for (Py_ssize_t i = 0; i < num_lanes; i++) {
        Write *write = &writes[i];
        TextLane *lane = write->lane;
        if (write->num_texts) write->num_texts = PyList_GET_SIZE(lane->texts); /* It may be here twice. */
        if (!write->num_texts) continue;
        write->fd = lane->socket == Py_None ? -1 : ((SocketHandle *)lane->socket)->fd;
        write->begin = len;
        write->len = put_write(data + len, lane) - (data + len);
        len += write->len;
        if (PyList_SetSlice(lane->texts, 0, write->num_texts, NULL)) goto done;
    }
    /* Nobody changes lanes or closes sockets meanwhile: that is done by the thread that is here. */
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < num_lanes; i++) {
        Write *write = &writes[i];
        ssize_t sent = -1;
        if (write->fd >= 0)
            sent = send(write->fd, data + write->begin, write->len, MSG_DONTWAIT | MSG_NOSIGNAL);
        write->num_sent = sent < 0 ? 0 : sent; /* full, or closed */
    }
    Py_END_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < num_lanes; i++) {
        Write *write = &writes[i];
        TextLane *lane = write->lane;
        if (!write->num_texts) {
            if (append_pair(unwritten, (PyObject *)lane, Py_None)) goto done;
            continue;
        }
        num_texts += write->num_texts;
        lane->num_quiet_ticks = 0;
        if (!lane->is_resting) lane->flush_len = flush_len;
        if (write->num_sent == write->len) continue;
        PyObject *rest = PyBytes_FromStringAndSize(data + write->begin + write->num_sent,
                                                   write->len - write->num_sent);
        int failed = !rest || append_pair(unwritten, (PyObject *)lane, rest);
        Py_XDECREF(rest);
        if (failed) goto done;
    }
    result = Py_BuildValue("nO", num_texts, unwritten);
done:
    if (!result && !PyErr_Occurred()) PyErr_NoMemory();
    Py_XDECREF(unwritten);
    PyMem_Free(writes);
    PyMem_Free(data);
    return result;
}

PyMethodDef lane_functions[] = {{"deliver", FASTCALL(deliver)}, {"write", FASTCALL(write_lanes)}, {NULL}};

int init_lanes(void) {
    sequence_id_name = PyUnicode_InternFromString("sequence_id");
    return sequence_id_name ? 0 : -1;
}
