package penstock

import (
	"testing"
	"time"
)

func TestAWorkerMayHaveNoTimeToFinish(t *testing.T) {
	for text, grace := range map[string]time.Duration{"0": time.Nanosecond, "0.0": time.Nanosecond, "2": 2 * time.Second} {
		t.Setenv("PENSTOCK_GRACE_SECONDS", text)
		options, err := OptionsFromEnvironment()
		if err != nil || options.Grace != grace {
			t.Errorf("%q: %v, %v", text, options.Grace, err)
		}
	}
	t.Setenv("PENSTOCK_GRACE_SECONDS", "-1")
	if _, err := OptionsFromEnvironment(); err == nil {
		t.Error("-1 is taken")
	}
}
