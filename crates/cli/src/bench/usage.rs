//! What a process used: CPU time of this one, memory of any.

use std::time::Duration;

use oncebox::app::AppError;

/// CPU time of this process so far, all threads, user and system.
pub(super) fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// The most memory that a running process has had resident so far, in bytes (`VmHWM` of Linux).
pub(super) fn resident_peak(process: u32) -> Result<f64, AppError> {
    memory(process, "VmHWM:")
}

/// The memory that a running process has resident now, in bytes (`VmRSS`).
pub(super) fn resident(process: u32) -> Result<f64, AppError> {
    memory(process, "VmRSS:")
}

fn memory(process: u32, name: &str) -> Result<f64, AppError> {
    let file = format!("/proc/{process}/status");
    let text = std::fs::read_to_string(&file).map_err(|error| AppError::failed(format!("{file}: {error}")))?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kilobytes = line.and_then(|rest| rest.trim().strip_suffix("kB")).and_then(|number| number.trim().parse().ok());
    kilobytes
        .map(|kilobytes: f64| kilobytes * 1_024.0)
        .ok_or_else(|| AppError::failed(format!("{file} does not say how much memory is resident")))
}
