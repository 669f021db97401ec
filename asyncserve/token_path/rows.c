/* `rows.py` in C: what planning and applying a step do for sequences that decode. */

#include "native.h"

typedef struct {
    PyObject_HEAD
    PyObject *token_ids, *stop_token_ids;
    Py_ssize_t slot, max_len, plain_until, num_computed_tokens, num_unseen_tokens, last_step_id;
    char accepts_output;
} SequenceRow;

static int sequence_traverse(SequenceRow *self, visitproc visit, void *arg) {
    Py_VISIT(self->token_ids);
    Py_VISIT(self->stop_token_ids);
    return 0;
}

static int sequence_clear(SequenceRow *self) {
    Py_CLEAR(self->token_ids);
    Py_CLEAR(self->stop_token_ids);
    return 0;
}

static void sequence_dealloc(SequenceRow *self) {
    PyObject_GC_UnTrack(self);
    sequence_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int sequence_init(SequenceRow *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {NULL};
    return PyArg_ParseTupleAndKeywords(args, keywords, "", names) ? 0 : -1;
}

static PyMemberDef sequence_members[] = {
    {"token_ids", T_OBJECT_EX, offsetof(SequenceRow, token_ids)},
    {"stop_token_ids", T_OBJECT_EX, offsetof(SequenceRow, stop_token_ids)},
    {"slot", T_PYSSIZET, offsetof(SequenceRow, slot)},
    {"max_len", T_PYSSIZET, offsetof(SequenceRow, max_len)},
    {"plain_until", T_PYSSIZET, offsetof(SequenceRow, plain_until)},
    {"num_computed_tokens", T_PYSSIZET, offsetof(SequenceRow, num_computed_tokens)},
    {"num_unseen_tokens", T_PYSSIZET, offsetof(SequenceRow, num_unseen_tokens)},
    {"last_step_id", T_PYSSIZET, offsetof(SequenceRow, last_step_id)},
    {"accepts_output", T_BOOL, offsetof(SequenceRow, accepts_output)},
    {NULL},
};

PyTypeObject SequenceRowType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "asyncserve.token_path.native.SequenceRow",
    .tp_basicsize = sizeof(SequenceRow),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)sequence_init,
    .tp_dealloc = (destructor)sequence_dealloc,
    .tp_traverse = (traverseproc)sequence_traverse,
    .tp_clear = (inquiry)sequence_clear,
    .tp_members = sequence_members,
};

static PyObject *append_name;

static SequenceRow *row_at(PyObject *list, Py_ssize_t position) {
    PyObject *row = PyList_GET_ITEM(list, position);
    if (PyObject_TypeCheck(row, &SequenceRowType)) return (SequenceRow *)row;
    PyErr_SetString(PyExc_TypeError, "the sequences are of SequenceRow");
    return NULL;
}

static int append_number(PyObject *list, Py_ssize_t number) {
    PyObject *object = PyLong_FromSsize_t(number);
    if (!object) return -1;
    int status = PyList_Append(list, object);
    Py_DECREF(object);
    return status;
}

static PyObject *plan_rows(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 5 || !PyList_Check(args[0]) || !PyList_Check(args[2]) || !PyList_Check(args[3]) ||
        !PyList_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "plan_rows takes a list, a number and three lists");
        return NULL;
    }
    PyObject *sequences = args[0], *slots = args[2], *starts = args[3], *planned = args[4];
    Py_ssize_t step_id = PyLong_AsSsize_t(args[1]);
    if (step_id == -1 && PyErr_Occurred()) return NULL;
    PyObject *lacking = PyList_New(0);
    if (!lacking) return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(sequences); i++) {
        SequenceRow *row = row_at(sequences, i);
        if (!row) goto failed;
        Py_ssize_t start = row->num_computed_tokens;
        if (start >= row->plain_until) {
            if (start + 1 < row->max_len && PyList_Append(lacking, (PyObject *)row)) goto failed;
            continue;
        }
        if (append_number(slots, row->slot) || append_number(starts, start) ||
            PyList_Append(planned, (PyObject *)row))
            goto failed;
        row->num_computed_tokens = start + 1;
        row->num_unseen_tokens++;
        row->last_step_id = step_id;
    }
    return lacking;
failed:
    Py_DECREF(lacking);
    return NULL;
}

/* Whether a row may be given a token that means nothing else; -1 with an exception. */
static int is_plain(SequenceRow *row, PyObject *token_id, PyObject *special_slots) {
    if (!row->token_ids || !row->stop_token_ids || !row->accepts_output) return 0;
    long number = PyLong_AsLong(token_id);
    if (number < 0) return PyErr_Occurred() ? -1 : 0;
    Py_ssize_t len = PyObject_Size(row->token_ids);
    if (len < 0) return -1;
    if (len + 1 >= row->max_len) return 0;
    int stops = PySequence_Contains(row->stop_token_ids, token_id);
    if (stops) return stops < 0 ? -1 : 0;
    if (PyDict_GET_SIZE(special_slots) == 0) return 1;
    PyObject *slot = PyLong_FromSsize_t(row->slot);
    int is_special = slot ? PyDict_Contains(special_slots, slot) : -1;
    Py_XDECREF(slot);
    return is_special < 0 ? -1 : !is_special;
}

static PyObject *apply_rows(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 3 || !PyList_Check(args[0]) || !PyDict_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "apply_rows takes a list, tokens and a dict");
        return NULL;
    }
    PyObject *sequences = args[0], *special_slots = args[2];
    PyObject *token_ids = PySequence_Fast(args[1], "the tokens are a sequence");
    PyObject *others = token_ids ? PyList_New(0) : NULL;
    if (!others) goto failed;
    if (PySequence_Fast_GET_SIZE(token_ids) != PyList_GET_SIZE(sequences)) {
        PyErr_SetString(PyExc_ValueError, "there is a token for each sequence");
        goto failed;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(sequences); i++) {
        SequenceRow *row = row_at(sequences, i);
        if (!row) goto failed;
        PyObject *token_id = PySequence_Fast_GET_ITEM(token_ids, i);
        int plain = is_plain(row, token_id, special_slots);
        if (plain < 0) goto failed;
        if (!plain) {
            if (append_pair(others, (PyObject *)row, token_id)) goto failed;
            continue;
        }
        PyObject *none = PyObject_CallMethodOneArg(row->token_ids, append_name, token_id);
        if (!none) goto failed;
        Py_DECREF(none);
        row->num_unseen_tokens--;
    }
    Py_DECREF(token_ids);
    return others;
failed:
    Py_XDECREF(token_ids);
    Py_XDECREF(others);
    return NULL;
}

PyMethodDef row_functions[] = {
    {"plan_rows", FASTCALL(plan_rows)}, {"apply_rows", FASTCALL(apply_rows)}, {NULL}};

int init_rows(void) {
    append_name = PyUnicode_InternFromString("append");
    return append_name ? 0 : -1;
}
