//! The chained hash of a prefix: where to look for a cached block.
//!
//! Owns nothing.  The hash only finds candidates; [`crate::block::CachedBlockAllocator`] compares
//! contents before it accepts one.  The hash never changes: no seed, no platform dependence, so
//! that a logged run replays on any machine.
//!
//! Costs: about half a nanosecond a token.

use crate::ids::TokenId;

/// Key of a prefix besides its tokens: the adapter, and a salt that separates tenants.  Blocks are
/// shared only under an equal key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PrefixKey {
    /// The adapter, 0 for none.
    pub adapter: u32,
    /// Salt chosen by the caller; prefixes of different salts are never equal.
    pub salt: u64,
}

/// The hash of a prefix of whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PrefixHash(u64);

impl PrefixHash {
    /// The hash of the empty prefix under `key`.
    pub fn root(key: PrefixKey) -> Self {
        Self(mix(mix(0x5157_1CE5_0F1A_7E57, u64::from(key.adapter)), key.salt))
    }

    /// The hash of this prefix followed by one block of `tokens`.
    #[must_use]
    pub fn extend(self, tokens: &[TokenId]) -> Self {
        let word = |pair: &[TokenId]| {
            pair.iter().fold(1, |word, token| (word << 32) | u64::from(token.cast_unsigned()))
        };
        Self(tokens.chunks(2).map(word).fold(mix(self.0, tokens.len() as u64), mix))
    }

    /// The hash as an integer.
    pub fn bits(self) -> u64 {
        self.0
    }
}

/// One round of a multiply-fold hash (the 128-bit product folded to 64 bits, as in wyhash).
#[expect(clippy::cast_possible_truncation, reason = "folding keeps both halves")]
fn mix(state: u64, word: u64) -> u64 {
    let product =
        u128::from(state ^ 0x9E37_79B9_7F4A_7C15) * u128::from(word ^ 0xD6E8_FEB8_6659_FD93);
    (product as u64) ^ ((product >> 64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_lengths_and_order_all_count() {
        let root = PrefixHash::root(PrefixKey::default());
        let distinct = [
            root,
            PrefixHash::root(PrefixKey { adapter: 1, salt: 0 }),
            PrefixHash::root(PrefixKey { adapter: 0, salt: 1 }),
            root.extend(&[1, 2]),
            root.extend(&[2, 1]),
            root.extend(&[1]).extend(&[2]),
            root.extend(&[1, 2, 0]),
            root.extend(&[]),
        ];
        for (position, hash) in distinct.iter().enumerate() {
            assert!(!distinct[..position].contains(hash), "{position}");
        }
    }

    #[test]
    fn the_hash_never_changes() {
        let hash = PrefixHash::root(PrefixKey { adapter: 3, salt: 9 }).extend(&[5, 6, 7]);
        assert_eq!(hash.bits(), 4_204_201_883_818_947_711);
    }
}
