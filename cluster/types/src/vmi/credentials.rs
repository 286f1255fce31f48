//! Keys and passwords of the guest's users (`spec.accessCredentials`).

use super::{VmiSpec, count, references::validate_name};
use crate::{Causes, FieldPath};

object! {
    /// A credential: exactly one kind.
    pub struct AccessCredential {
        /// Public keys.
        pub ssh_public_key: Option<SshCredential>,
        /// Passwords.
        pub user_password: Option<PasswordCredential>,
    }

    /// Public keys of SSH.
    pub struct SshCredential {
        /// Where they come from.
        pub source: CredentialSource,
        /// How they reach the guest.
        pub propagation_method: CredentialMethod,
    }

    /// Passwords.
    pub struct PasswordCredential {
        /// Where they come from.
        pub source: CredentialSource,
        /// How they reach the guest.
        pub propagation_method: CredentialMethod,
    }

    /// Where credentials come from.
    pub struct CredentialSource {
        /// A Secret.
        pub secret: Option<SecretSource>,
    }

    /// A Secret.
    pub struct SecretSource {
        /// Its name.
        pub secret_name: String,
    }

    /// How credentials reach the guest: exactly one way.
    pub struct CredentialMethod {
        /// By cloud-init.
        pub no_cloud: Option<AgentMethod>,
        /// By cloud-init.
        pub config_drive: Option<AgentMethod>,
        /// By the guest's agent.
        pub qemu_guest_agent: Option<AgentMethod>,
    }

    /// A way into the guest.
    pub struct AgentMethod {
        /// The users whose keys are written, for the agent.
        pub users: Vec<String>,
    }
}

pub(super) fn validate(spec: &VmiSpec, path: &FieldPath, causes: &mut Causes) {
    for (index, credential) in spec.access_credentials.iter().enumerate() {
        let path = path.index(index);
        let AccessCredential {
            ssh_public_key,
            user_password,
        } = credential;
        if count(&[ssh_public_key.is_some(), user_password.is_some()]) != 1 {
            causes.invalid(
                &path,
                "must have exactly one of sshPublicKey and userPassword",
            );
        }
        if let Some(SshCredential {
            source,
            propagation_method,
        }) = ssh_public_key
        {
            let path = path.child("sshPublicKey");
            validate_source(source, &path, causes);
            validate_method(spec, propagation_method, &path, causes);
            let agent = propagation_method.qemu_guest_agent.as_ref();
            if agent.is_some_and(|agent| agent.users.is_empty()) {
                causes.required(
                    &path.child("propagationMethod.qemuGuestAgent.users"),
                    "must name the users",
                );
            }
        }
        if let Some(PasswordCredential {
            source,
            propagation_method,
        }) = user_password
        {
            let path = path.child("userPassword");
            validate_source(source, &path, causes);
            if propagation_method.qemu_guest_agent.is_none() {
                causes.required(&path.child("propagationMethod"), "must be qemuGuestAgent");
            }
        }
    }
}

fn validate_source(source: &CredentialSource, path: &FieldPath, causes: &mut Causes) {
    match &source.secret {
        Some(secret) if !secret.secret_name.is_empty() => {
            let path = path.child("source.secret.secretName");
            validate_name(&secret.secret_name, &path, causes);
        }
        _ => causes.required(&path.child("source"), "must name a secret"),
    }
}

fn validate_method(
    spec: &VmiSpec,
    method: &CredentialMethod,
    path: &FieldPath,
    causes: &mut Causes,
) {
    let path = path.child("propagationMethod");
    let CredentialMethod {
        no_cloud,
        config_drive,
        qemu_guest_agent,
    } = method;
    let given = [
        no_cloud.is_some(),
        config_drive.is_some(),
        qemu_guest_agent.is_some(),
    ];
    if count(&given) != 1 {
        causes.invalid(
            &path,
            "must have exactly one of noCloud, configDrive and qemuGuestAgent",
        );
    }
    let has = |has: fn(&super::Volume) -> bool| spec.volumes.iter().any(has);
    if no_cloud.is_some() && !has(|volume| volume.cloud_init_no_cloud.is_some()) {
        causes.invalid(&path.child("noCloud"), "needs a cloudInitNoCloud volume");
    }
    if config_drive.is_some() && !has(|volume| volume.cloud_init_config_drive.is_some()) {
        causes.invalid(
            &path.child("configDrive"),
            "needs a cloudInitConfigDrive volume",
        );
    }
}
