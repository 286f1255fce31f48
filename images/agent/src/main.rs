//! Room.
fn main() {}
