//! The `TokenLookup` class.

use pagedserve_core::ids::TokenId;
use pagedserve_core::lookup as core;
use pyo3::prelude::*;

use crate::config::count;

/// Texts in which is looked up what followed the newest tokens when they came before.
///
/// Costs O(1) a token that is added, and some microseconds a question whatever the length of the text.
///
/// Args:
///     min_match: Tokens of a match at least, at least 1.
///     max_match: Of longer matches so many are compared; the longest is chosen, of several the newest.
///     max_tokens: Beyond so many tokens the older half is forgotten.
///
/// Raises:
///     ``ConfigError``: A negative number.
///
/// Example:
///     >>> from pagedserve import TokenLookup
///     >>> lookup = TokenLookup(min_match=2, max_match=8)
///     >>> lookup.extend([5, 6, 7, 8, 9, 5, 6])
///     >>> lookup.propose(3)
///     [7, 8, 9]
#[pyclass(module = "pagedserve._core")]
pub(crate) struct TokenLookup(core::TokenLookup);

#[pymethods]
impl TokenLookup {
    #[new]
    #[pyo3(signature = (*, min_match, max_match, max_tokens = 16_777_216))]
    fn new(min_match: i64, max_match: i64, max_tokens: i64) -> PyResult<Self> {
        Ok(Self(core::TokenLookup::new(
            count("min_match", min_match)?,
            count("max_match", max_match)?,
            count("max_tokens", max_tokens)?,
        )))
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    /// Make the newest text longer.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from a list")]
    fn extend(&mut self, token_ids: Vec<TokenId>) {
        self.0.extend(&token_ids);
    }

    /// End the newest text; what is added begins another.
    fn end_text(&mut self) {
        self.0.end_text();
    }

    /// What came behind the longest match of the newest text's end, at most ``most`` tokens.
    fn propose(&self, most: usize) -> Vec<TokenId> {
        self.0.propose(most)
    }

    /// The same for the last tokens of another text, which is not among these.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from a list")]
    fn propose_for(&self, token_ids: Vec<TokenId>, most: usize) -> Vec<TokenId> {
        self.0.propose_for(&token_ids, most)
    }
}
