"""Random fault schedules against what must always hold; what fails is shortened and replayed."""
