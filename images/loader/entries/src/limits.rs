//! How much of a disk is read and kept before its entry is known.

/// Bytes of one configuration file.
pub const FILE_BYTES: usize = 1 << 20;
/// Bytes that all configuration files of a search have together.
pub const TOTAL_BYTES: usize = 16 << 20;
/// Files and directories that a search looks at.
pub const LOOKUPS: usize = 20_000;
/// Names in one directory.
pub const DIRECTORY_NAMES: usize = 4096;
/// Bytes of a path.
pub const PATH_BYTES: usize = 1024;
/// Entries of one menu, or of one directory of entries.
pub const ENTRIES: usize = 4096;
/// Initial file systems of one entry.
pub const INITRDS: usize = 32;
/// Bytes of a command line: what Linux takes on x86 (`COMMAND_LINE_SIZE`), less its terminator.
pub const CMDLINE_BYTES: usize = 2047;
/// Files that include each other.
pub const INCLUDES: usize = 8;
/// Commands that a `grub.cfg` executes.
pub const COMMANDS: usize = 10_000;
/// Blocks, conditions and functions within each other in a `grub.cfg`.
pub const NESTING: usize = 32;
/// Bytes that a `grub.cfg` makes of its variables, in all.
pub const EXPANDED_BYTES: usize = 8 << 20;
/// Bytes of a variable's value.
pub const VALUE_BYTES: usize = 64 << 10;
/// Variables of a `grub.cfg`, and its functions.
pub const VARIABLES: usize = 2048;
/// Directories of vendors in an EFI system partition.
pub const VENDORS: usize = 32;
