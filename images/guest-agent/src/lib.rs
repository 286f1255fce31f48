//! A guest agent for systems that bring none: it speaks the protocol of QEMU's at the port
//! `org.qemu.guest_agent.0` of a virtual machine, and is one static program.
//!
//! [`protocol`] is pure: bytes to commands, and answers to bytes, all of limited size. [`linux`]
//! carries the commands out, and waits for all that happens in one loop.
//!
//! | what | most |
//! | --- | --- |
//! | a request | [`protocol::MAX_REQUEST`] bytes |
//! | programs that run, or whose end nobody has asked for | [`linux::MAX_PROGRAMS`] |
//! | output that is kept of one program, and of all | [`linux::MAX_OUTPUT`], [`linux::MAX_KEPT`] |
//! | open files | [`linux::MAX_FILES`] |
//! | how long file systems stay frozen | [`linux::LONGEST_FREEZE`] |
//!
//! Nothing is written while file systems are frozen, not even to the log, and thawing takes neither
//! memory of their files nor a look at their directories: the agent never locks itself out.

#[cfg(feature = "test-utils")]
pub mod fuzzing;
pub mod linux;
pub mod protocol;
