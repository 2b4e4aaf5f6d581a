// Package nearest helps who mistyped a word.
package nearest

import (
	"fmt"
	"slices"
	"strings"
)

// Hint names the nearest of the known words, and all of them if none is near.
func Hint(word string, known []string) string {
	slices.Sort(known)
	best, distance := "", len(word)/2+1
	for _, k := range known {
		if common(word, k) >= max(3, len(word)-1) {
			return fmt.Sprintf("; did you mean %q?", k)
		}
		if d := levenshtein(word, k); d < distance {
			best, distance = k, d
		}
	}
	switch {
	case best != "":
		return fmt.Sprintf("; did you mean %q?", best)
	case len(known) == 0:
		return ""
	default:
		return "; known: " + strings.Join(known, ", ")
	}
}

// common is how many bytes a and b begin with in common.
func common(a, b string) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

func levenshtein(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], cost
		}
	}
	return row[len(b)]
}
