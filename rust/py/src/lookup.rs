//! The `TokenLookup` class.

use pagedserve_core::ids::TokenId;
use pagedserve_core::lookup as core;
use pyo3::prelude::*;

use crate::config::count;

/// Draft tokens by prompt lookup: what followed the newest tokens at their last occurrence.
///
/// Costs O(1) per added token, and some microseconds per proposal whatever the length.
///
/// Args:
///     min_match: Minimum number of matching tokens, at least 1.
///     max_match: Maximum number of tokens compared; the longest match wins, of equals the newest.
///     max_tokens: Capacity in tokens; beyond it the older half is dropped.
///
/// Raises:
///     ``ConfigError``: A negative number.
///
/// Example:
///     >>> from pagedserve.scheduler import TokenLookup
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

    /// Append tokens to the newest sequence.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from a list")]
    fn extend(&mut self, token_ids: Vec<TokenId>) {
        self.0.extend(&token_ids);
    }

    /// End the newest sequence; later tokens begin another.
    fn end_text(&mut self) {
        self.0.end_text();
    }

    /// Return up to ``most`` tokens that followed the longest match of the newest tokens.
    fn propose(&self, most: usize) -> Vec<TokenId> {
        self.0.propose(most)
    }

    /// Return a proposal for a sequence that was not added, by its last tokens.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from a list")]
    fn propose_for(&self, token_ids: Vec<TokenId>, most: usize) -> Vec<TokenId> {
        self.0.propose_for(&token_ids, most)
    }
}
