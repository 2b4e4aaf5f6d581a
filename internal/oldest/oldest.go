// Package oldest compares versions of servers with the oldest that will do.
package oldest

import (
	"fmt"
	"strconv"
	"strings"
)

// Check returns an error if a version is older than the oldest that is needed, by their first two numbers. A version that is not known
// will do.
func Check(version, needed string) error {
	have, ok := parse(version)
	want, _ := parse(needed)
	if ok && (have[0] < want[0] || have[0] == want[0] && have[1] < want[1]) {
		return fmt.Errorf("it is version %s, and %s or later is needed", version, needed)
	}
	return nil
}

func parse(s string) (n [2]int, ok bool) {
	major, rest, _ := strings.Cut(strings.TrimPrefix(s, "v"), ".")
	minor, _, _ := strings.Cut(rest, ".")
	var err1, err2 error
	n[0], err1 = strconv.Atoi(major)
	n[1], err2 = strconv.Atoi(minor)
	return n, err1 == nil && err2 == nil
}
