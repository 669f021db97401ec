/* A part of `prefix_hash.py` in C: the digests of blocks behind the first. */

#include "native.h"

#include <stdint.h>
#include <string.h>

static PyObject *sha256, *digest_name;

/* Heads of CBOR (RFC 8949, 3): the major type, and a number in as few bytes as hold it. */
enum { UNSIGNED = 0x00, NEGATIVE = 0x20, BYTES = 0x40, ARRAY = 0x80, NULL_VALUE = 0xf6 };

#define MOST_HEAD_LEN 5

static unsigned char *put_head(unsigned char *at, int major, uint32_t number) {
    if (number < 24) {
        *at++ = (unsigned char)(major | number);
        return at;
    }
    int log_len = number <= 0xff ? 0 : number <= 0xffff ? 1 : 2;
    *at++ = (unsigned char)(major | (24 + log_len));
    for (int shift = (8 << log_len) - 8; shift >= 0; shift -= 8) *at++ = (unsigned char)(number >> shift);
    return at;
}

/* Return the digest of `(parent, token ids, None)`. `room` is as large as `room_for` says. */
static PyObject *block_digest(unsigned char *room, PyObject *parent, const int32_t *token_ids,
                              Py_ssize_t block_len) {
    unsigned char *at = put_head(room, ARRAY, 3);
    at = put_head(at, BYTES, (uint32_t)PyBytes_GET_SIZE(parent));
    memcpy(at, PyBytes_AS_STRING(parent), PyBytes_GET_SIZE(parent));
    at = put_head(at + PyBytes_GET_SIZE(parent), ARRAY, (uint32_t)block_len);
    for (Py_ssize_t i = 0; i < block_len; i++)
        at = token_ids[i] < 0 ? put_head(at, NEGATIVE, (uint32_t)(-1 - token_ids[i]))
                              : put_head(at, UNSIGNED, (uint32_t)token_ids[i]);
    *at++ = NULL_VALUE;
    PyObject *data = PyBytes_FromStringAndSize((char *)room, at - room);
    PyObject *hash = data ? PyObject_CallOneArg(sha256, data) : NULL;
    PyObject *digest = hash ? PyObject_CallMethodNoArgs(hash, digest_name) : NULL;
    Py_XDECREF(data);
    Py_XDECREF(hash);
    return digest;
}

static PyObject *extend_digests(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 4 || !PyList_Check(args[0]) || PyList_GET_SIZE(args[0]) == 0) {
        PyErr_SetString(PyExc_TypeError, "extend_digests takes a list with a digest and three more");
        return NULL;
    }
    PyObject *digests = args[0], *result = NULL;
    Py_ssize_t num_blocks = PyLong_AsSsize_t(args[2]), block_len = PyLong_AsSsize_t(args[3]);
    if (PyErr_Occurred()) return NULL;
    Py_buffer tokens;
    if (PyObject_GetBuffer(args[1], &tokens, PyBUF_SIMPLE)) return NULL;
    unsigned char *room = NULL;
    PyObject *parent = PyList_GET_ITEM(digests, PyList_GET_SIZE(digests) - 1);
    if (block_len < 1 || num_blocks > tokens.len / (Py_ssize_t)sizeof(int32_t) / block_len) {
        PyErr_SetString(PyExc_ValueError, "there are fewer tokens than the blocks have");
        goto done;
    }
    if (!PyBytes_Check(parent)) {
        PyErr_SetString(PyExc_TypeError, "a digest is of bytes");
        goto done;
    }
    if (num_blocks <= PyList_GET_SIZE(digests)) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    /* All digests that follow are as long as SHA-256's. */
    Py_ssize_t parent_len = PyBytes_GET_SIZE(parent) > 32 ? PyBytes_GET_SIZE(parent) : 32;
    room = PyMem_Malloc(parent_len + MOST_HEAD_LEN * (block_len + 3) + 1);
    if (!room) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = PyList_GET_SIZE(digests); i < num_blocks; i++) {
        parent = PyList_GET_ITEM(digests, i - 1);
        PyObject *digest = block_digest(room, parent, (const int32_t *)tokens.buf + i * block_len, block_len);
        int failed = !digest || PyList_Append(digests, digest);
        Py_XDECREF(digest);
        if (failed) goto done;
    }
    result = Py_NewRef(Py_None);
done:
    PyMem_Free(room);
    PyBuffer_Release(&tokens);
    return result;
}

PyMethodDef hash_functions[] = {{"extend_digests", FASTCALL(extend_digests)}, {NULL}};

int init_hash(void) {
    PyObject *hashlib = PyImport_ImportModule("hashlib");
    sha256 = hashlib ? PyObject_GetAttrString(hashlib, "sha256") : NULL;
    Py_XDECREF(hashlib);
    digest_name = PyUnicode_InternFromString("digest");
    return sha256 && digest_name ? 0 : -1;
}
