//! Limits of messages.

/// Most bytes of one message, in both directions.
pub const MAX_MESSAGE_BYTES: usize = 4 << 20;

/// Most bytes of a stream that one message should carry: larger ones only take more memory.
pub const MAX_CHUNK_BYTES: usize = 64 << 10;
