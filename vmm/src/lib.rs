//! An in-process virtual machine monitor for Linux guests on KVM.

mod layout;
