//! Lists of strings in the header of a GGUF file: each is a length of 8 bytes and that many bytes.

use pyo3::exceptions::{PyUnicodeDecodeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString};

const LENGTH: usize = size_of::<u64>();

/// The string at an offset; None if it is not complete.
fn text_at(content: &[u8], at: usize, big_endian: bool) -> Option<&[u8]> {
    let (length, rest) = content.get(at..)?.split_first_chunk::<LENGTH>()?;
    let length = if big_endian { u64::from_be_bytes(*length) } else { u64::from_le_bytes(*length) };
    rest.get(..usize::try_from(length).ok()?)
}

/// The strings of a list of complete ones.
fn texts(content: &[u8], big_endian: bool) -> impl Iterator<Item = &[u8]> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let text = text_at(content, at, big_endian)?;
        at += LENGTH + text.len();
        Some(text)
    })
}

/// Pass over the complete strings of a list, up to the first that is too long.
///
/// Args:
///     content: Bytes of a file from its start.
///     at: Offset of the first string.
///     count: Maximum number of strings to pass over.
///     max_bytes: Maximum length of a string in bytes.
///     big_endian: Byte order of the lengths.
///
/// Returns:
///     Number of strings passed over, and the offset of the byte after them.
#[pyfunction]
#[pyo3(signature = (content, at, count, *, max_bytes, big_endian))]
pub(crate) fn pass_texts(
    content: &[u8],
    at: usize,
    count: usize,
    max_bytes: usize,
    big_endian: bool,
) -> (usize, usize) {
    let mut end = at;
    for passed in 0..count {
        match text_at(content, end, big_endian) {
            Some(text) if text.len() <= max_bytes => end += LENGTH + text.len(),
            _ => return (passed, end),
        }
    }
    (count, end)
}

/// Return the strings of a list.
///
/// Args:
///     content: The list's bytes, all of them strings.
///     big_endian: Byte order of the lengths.
///
/// Raises:
///     ``UnicodeDecodeError``: A string is not UTF-8.
#[pyfunction]
#[pyo3(signature = (content, *, big_endian))]
pub(crate) fn read_texts<'py>(
    py: Python<'py>,
    content: &[u8],
    big_endian: bool,
) -> PyResult<Bound<'py, PyList>> {
    let found = PyList::empty(py);
    for text in texts(content, big_endian) {
        found.append(PyString::new(py, decoded(py, text)?))?;
    }
    Ok(found)
}

/// Return the strings of a list, each split at its only space.
///
/// Args:
///     content: The list's bytes, all of them strings.
///     big_endian: Byte order of the lengths.
///
/// Raises:
///     ``UnicodeDecodeError``: A string is not UTF-8.
///     ``ValueError``: A string has no space, or several.
#[pyfunction]
#[pyo3(signature = (content, *, big_endian))]
pub(crate) fn read_pairs<'py>(
    py: Python<'py>,
    content: &[u8],
    big_endian: bool,
) -> PyResult<Bound<'py, PyList>> {
    let pairs = PyList::empty(py);
    for text in texts(content, big_endian) {
        let shown = decoded(py, text)?;
        match shown.split_once(' ') {
            Some((left, right)) if !right.contains(' ') => pairs.append((left, right))?,
            _ => {
                let said = format!("{shown:?} is no pair: it must have one space");
                return Err(PyValueError::new_err(said));
            }
        }
    }
    Ok(pairs)
}

fn decoded<'a>(py: Python<'_>, text: &'a [u8]) -> PyResult<&'a str> {
    std::str::from_utf8(text).map_err(|error| {
        match PyUnicodeDecodeError::new_utf8(py, text, error) {
            Ok(raised) => PyErr::from_value(raised.into_any()),
            Err(failed) => failed,
        }
    })
}
