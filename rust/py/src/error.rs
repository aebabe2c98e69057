//! Core errors as Python exceptions: the only place that names them.

use pagedserve_core::error::Error;
use pyo3::prelude::*;
use pyo3::types::PyType;

/// The class in `pagedserve.errors` for a core error.
fn class_of(error: &Error) -> &'static str {
    match error {
        Error::Config(_) => "ConfigError",
        Error::Request(_) => "RequestError",
        Error::StaleHandle { .. } => "StaleHandleError",
        Error::Step(_) | Error::Arrays(_) => "StepError",
        Error::Invariant(_) => "InvariantError",
        _ => "PagedServeError",
    }
}

/// The exception for a core error.
pub(crate) fn to_py(error: &Error) -> PyErr {
    Python::attach(|py| {
        let class = py
            .import("pagedserve.errors")
            .and_then(|errors| Ok(errors.getattr(class_of(error))?.cast_into::<PyType>()?));
        match class {
            Ok(class) => PyErr::from_type(class, error.to_string()),
            Err(import_error) => import_error,
        }
    })
}

/// Maps the error of a result.
pub(crate) trait OrRaise<T> {
    fn or_raise(self) -> PyResult<T>;
}

/// Maps the refusal of a CPU kernel: arrays that do not fit each other.
impl<T> OrRaise<T> for Result<T, pagedserve_cpu::Error> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(|error| to_py(&Error::Arrays(error.to_string())))
    }
}

impl<T> OrRaise<T> for Result<T, Error> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(|error| to_py(&error))
    }
}
