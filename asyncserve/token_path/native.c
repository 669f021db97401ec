/* The extension `native`: `lanes.py`, `rows.py` and a part of `prefix_hash.py` in C.

   Types, arguments, results and errors are described there. Arguments of another type than described raise a
   TypeError here, where Python might do; a lane with such attributes is given back by `write` as one of which
   no write can be made. */

#include "native.h"

int append_pair(PyObject *list, PyObject *first, PyObject *second) {
    PyObject *pair = PyTuple_Pack(2, first, second);
    if (!pair) return -1;
    int status = PyList_Append(list, pair);
    Py_DECREF(pair);
    return status;
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "asyncserve.token_path.native", NULL, -1, NULL,
};

PyMODINIT_FUNC PyInit_native(void) {
    if (init_lanes() || init_rows() || init_hash()) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module && (PyModule_AddType(module, &SocketHandleType) || PyModule_AddType(module, &TextLaneType) ||
                   PyModule_AddType(module, &TextRowType) || PyModule_AddType(module, &SequenceRowType) ||
                   PyModule_AddFunctions(module, lane_functions) ||
                   PyModule_AddFunctions(module, row_functions) ||
                   PyModule_AddFunctions(module, hash_functions)))
        Py_CLEAR(module);
    return module;
}
