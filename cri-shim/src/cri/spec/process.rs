//! The process of a container: command, environment, directory, user.

use oci_spec::image;
use oci_spec::runtime::{Process, ProcessBuilder, UserBuilder};
use podvisor_cri_messages::{
    ContainerConfig, LinuxContainerSecurityContext, SupplementalGroupsPolicy,
};

use super::capabilities;
use super::fault::SpecFault;
use super::request::SpecRequest;
use crate::sandbox::{
    SupplementalGroups, default_environment, default_rlimits, from_root, further_process,
    image_entrypoint, process_capabilities, set_variable,
};

pub(super) fn process(
    request: &SpecRequest<'_>,
    security: &LinuxContainerSecurityContext,
) -> Result<Process, SpecFault> {
    let container = request.container;
    let allowed = capabilities::capabilities(security)?;
    let ambient = capabilities::ambient(security)?;
    let mut user = UserBuilder::default().uid(0_u32).gid(0_u32);
    let groups = group_ids(security)?;
    if !groups.is_empty() {
        user = user.additional_gids(groups);
    }
    let mut process = ProcessBuilder::default()
        .terminal(container.tty)
        .args(command_line(container, request.image)?)
        .env(environment(request)?)
        .cwd(working_directory(container, request.image)?)
        .user(user.build()?)
        .no_new_privileges(security.no_new_privs)
        .capabilities(process_capabilities(allowed, ambient)?)
        .rlimits(default_rlimits()?);
    let resources = container
        .linux
        .as_ref()
        .and_then(|linux| linux.resources.as_ref());
    if let Some(resources) = resources {
        let field = "linux.resources.oom_score_adj";
        let adjust = i32::try_from(resources.oom_score_adj).ok();
        let adjust = adjust.filter(|adjust| (-1000..=1000).contains(adjust));
        let adjust =
            adjust.ok_or_else(|| SpecFault::invalid(field, "it is a number from -1000 to 1000"))?;
        process = process.oom_score_adj(adjust);
    }
    Ok(process.build()?)
}

/// Returns the process of an exec: the container's, with another command.
pub(in crate::cri) fn exec_process(
    container: &Process,
    command: &[String],
    tty: bool,
) -> Result<Process, SpecFault> {
    if command.first().is_none_or(String::is_empty) {
        return Err(SpecFault::invalid("cmd", "it names no command"));
    }
    check_nul("cmd", command)?;
    Ok(further_process(container, command.to_vec(), tty))
}

/// Returns the command line by Kubernetes' rule: a command replaces the image's entrypoint and its
/// arguments; arguments without a command replace only the image's arguments.
fn command_line(
    container: &ContainerConfig,
    image: Option<&image::Config>,
) -> Result<Vec<String>, SpecFault> {
    let mut args = container.command.clone();
    let mut arguments = container.args.clone();
    if args.is_empty() {
        args = image.map(image_entrypoint).unwrap_or_default().to_vec();
        if arguments.is_empty() {
            let of_image = image.and_then(|image| image.cmd().clone());
            arguments = of_image.unwrap_or_default();
        }
    }
    args.extend(arguments);
    if args.first().is_none_or(String::is_empty) {
        return Err(SpecFault::invalid(
            "command",
            "neither the container nor its image names a command",
        ));
    }
    check_nul("command", &args)?;
    Ok(args)
}

/// Returns the default variables, then the container's.
fn environment(request: &SpecRequest<'_>) -> Result<Vec<String>, SpecFault> {
    let has_terminal = request.container.tty;
    let mut env = default_environment(request.hostname, has_terminal, request.image);
    for variable in &request.container.envs {
        if variable.key.is_empty() || variable.key.contains('=') {
            let reason = format!("{:?} is not the name of a variable", variable.key);
            return Err(SpecFault::invalid("envs", reason));
        }
        let entry = format!("{}={}", variable.key, variable.text());
        set_variable(&mut env, &entry);
    }
    check_nul("envs", &env)?;
    Ok(env)
}

fn working_directory(
    container: &ContainerConfig,
    image: Option<&image::Config>,
) -> Result<String, SpecFault> {
    let dir = match container.working_dir.as_str() {
        "" => image.and_then(|config| config.working_dir().clone()),
        dir => Some(dir.to_owned()),
    };
    let dir = dir.unwrap_or_default();
    if dir.contains('\0') {
        return Err(SpecFault::invalid("working_dir", "it holds a NUL byte"));
    }
    Ok(from_root(&dir))
}

fn check_nul(field: &'static str, strings: &[String]) -> Result<(), SpecFault> {
    match strings.iter().any(|s| s.contains('\0')) {
        true => Err(SpecFault::invalid(
            field,
            "it holds a NUL byte, which no process can be given",
        )),
        false => Ok(()),
    }
}

/// Returns `user[:group]` for the agent: the request's user, else the image's.
pub(super) fn user(
    security: &LinuxContainerSecurityContext,
    image: Option<&image::Config>,
) -> Result<String, SpecFault> {
    let by_number = security.run_as_user.as_ref().map(|user| user.value);
    let group = security.run_as_group.as_ref().map(|group| group.value);
    let number = |field, value: i64| match u32::try_from(value) {
        Ok(id) if id != u32::MAX => Ok(id.to_string()),
        _ => Err(SpecFault::invalid(field, format!("{value} is not an id"))),
    };
    let user = match by_number {
        Some(user) => number("security_context.run_as_user", user)?,
        None => security.run_as_username.clone(),
    };
    let Some(group) = group else {
        let of_image = || {
            image
                .and_then(|config| config.user().clone())
                .unwrap_or_default()
        };
        let user = if user.is_empty() { of_image() } else { user };
        // Root by number, so that it gets its groups of /etc/group like any other user.
        return Ok(if user.is_empty() {
            "0".to_owned()
        } else {
            user
        });
    };
    if user.is_empty() {
        return Err(SpecFault::invalid(
            "security_context.run_as_group",
            "it needs run_as_user or run_as_username",
        ));
    }
    if user.contains(':') {
        let reason = format!("{user:?} is not the name of a user");
        return Err(SpecFault::invalid(
            "security_context.run_as_username",
            reason,
        ));
    }
    Ok(format!(
        "{user}:{}",
        number("security_context.run_as_group", group)?
    ))
}

/// Returns which groups of the image's /etc/group the process gets in addition to those of the
/// request.
pub(super) fn groups(
    security: &LinuxContainerSecurityContext,
    image: Option<&image::Config>,
) -> SupplementalGroups {
    let policy = SupplementalGroupsPolicy::try_from(security.supplemental_groups_policy);
    let is_image_user =
        security.run_as_user.is_none() && security.run_as_username.is_empty() && image.is_some();
    match policy {
        Ok(SupplementalGroupsPolicy::Strict) => SupplementalGroups::Strict,
        // `USER name:group` of an image means only that group.
        _ if is_image_user => SupplementalGroups::Default,
        _ => SupplementalGroups::Merge,
    }
}

fn group_ids(security: &LinuxContainerSecurityContext) -> Result<Vec<u32>, SpecFault> {
    let field = "security_context.supplemental_groups";
    let id = |id: &i64| {
        let number = u32::try_from(*id).ok().filter(|id| *id != u32::MAX);
        number.ok_or_else(|| SpecFault::invalid(field, format!("{id} is not an id")))
    };
    security.supplemental_groups.iter().map(id).collect()
}
